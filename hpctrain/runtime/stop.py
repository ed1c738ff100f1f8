"""The agreement to stop, for code that trains without the `Trainer`."""

from __future__ import annotations

import os
from functools import cache

from hpctrain.cluster import detect
from hpctrain.runtime.pulse import pulse
from hpctrain.runtime.signals import listen


def should_stop() -> bool:
    """Whether the job was told to stop: the same answer on every rank. All ranks must call this.

    Call it where the state can be saved, every few seconds or oftener; then save, and leave with
    `sys.exit(75)`: "continue me". From the first call on a signal no longer ends the rank by itself.
    It costs one small all-reduce on the CPU.
    """
    told = _agreement().ask()
    # Whoever asks gets on.
    pulse.enter("step")
    pulse.trained()
    return told


class _Agreement:
    """What the ranks need to agree."""

    def __init__(self) -> None:
        """Note signals from now on, and meet the other ranks. All ranks must call this."""
        # Never left: whoever asks once is expected to ask again.
        self._listening = listen()
        self._flag = self._listening.__enter__()
        ranks = detect(os.environ)
        self._is_main, self._alone = ranks.is_main, ranks.world_size == 1
        self._said = False
        if not self._alone:
            from hpctrain.runtime.process_group import join

            self._group = join(ranks, os.environ).control

    def ask(self) -> bool:
        """Whether any rank was told to stop. All ranks must call this."""
        stop = self._flag.is_set if self._alone else self._any_rank_told()
        if stop and self._is_main and not self._said:
            self._said = True
            print(f"hpctrain: told to stop by {self._flag.signal_name or 'a signal to another rank'}")
        return stop

    def _any_rank_told(self) -> bool:
        import torch
        import torch.distributed as dist

        told = torch.tensor([int(self._flag.is_set)])
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
        return bool(told.item())


@cache
def _agreement() -> _Agreement:
    return _Agreement()
