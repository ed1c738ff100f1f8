"""Agree on all ranks to stop, for code that trains without the `Trainer`."""

from __future__ import annotations

import os
from functools import cache

from hpctrain.cluster import detect
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.stopping.stop_signals import capture_stop_signals
from hpctrain.schema import RankPhase


def should_stop() -> bool:
    """Return true if the job received a stop signal. All ranks must call this, and get the same result.

    Call this at points where the state can be saved, at least every few seconds. If the result is true, save
    and exit with `sys.exit(75)`, which requests a continuation. After the first call, a signal no longer ends
    the rank. Each call performs a small all-reduce on the CPU.
    """
    is_stopping = _consensus().any_rank_signalled()
    # Each call counts as a step, instead of those of optimizers.
    activity.is_managed = True
    activity.set_phase(RankPhase.SCRIPT)
    activity.step_done()
    return is_stopping


class _StopConsensus:
    def __init__(self) -> None:
        """Start to record signals, and join the other ranks. All ranks must call this."""
        # Never exited, because the script is expected to call this again.
        self._listening = capture_stop_signals()
        self._flag = self._listening.__enter__()
        ranks = detect(os.environ)
        self._is_main, self._is_single = ranks.is_main, ranks.world_size == 1
        self._announced = False
        if not self._is_single:
            from hpctrain.runtime.distributed_context import init_distributed

            self._group = init_distributed(ranks, os.environ).cpu_group

    def any_rank_signalled(self) -> bool:
        stop = self._flag.is_set if self._is_single else self._all_reduce_flag()
        if stop and self._is_main and not self._announced:
            self._announced = True
            print(f"hpctrain: stop requested by {self._flag.signal_name or 'a signal to another rank'}")
        return stop

    def _all_reduce_flag(self) -> bool:
        import torch
        import torch.distributed as dist

        is_signalled = torch.tensor([int(self._flag.is_set)])
        dist.all_reduce(is_signalled, op=dist.ReduceOp.MAX, group=self._group)
        return bool(is_signalled.item())


@cache
def _consensus() -> _StopConsensus:
    return _StopConsensus()
