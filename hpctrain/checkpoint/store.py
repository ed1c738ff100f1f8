"""Writes and finds the checkpoints of a run.

A checkpoint is a folder in the format of `torch.distributed.checkpoint`, plus `state.json` (everything that
is no tensor), `tensors.json` (which tensor lies where) and `manifest.json`. Every rank writes its share of
it, in the background, out of a copy of the state; `commit` says how it becomes a checkpoint.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.checkpoint.agreement import Agreement, reason
from hpctrain.checkpoint.capture import Camera
from hpctrain.checkpoint.commit import Site
from hpctrain.checkpoint.copying import NotCopied
from hpctrain.checkpoint.loading import Loaded, load
from hpctrain.checkpoint.newest import newest_whole
from hpctrain.checkpoint.place import Place
from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.saved import Save, Saved
from hpctrain.checkpoint.saving import Saving
from hpctrain.checkpoint.tier import Tier
from hpctrain.errors import CheckpointError

__all__ = ["CheckpointStore", "Loaded", "NotCopied", "Retention", "Saved"]

#: How long a disk may take nothing before the save is given up, in seconds.
PATIENCE_S = 300.0
#: How long a rank may keep the others waiting beyond that: for making folders and for renaming, in seconds.
_MARGIN_S = 60.0
#: How long the process waits at its end for a save in flight to be given up.
_EXIT_LIMIT_S = 10.0


class CheckpointStore:
    """The checkpoints in one folder.

    All ranks of `group` must call the constructor, `begin`, `save`, `load_newest` and `close` in the same
    order; the other methods are for each rank alone.
    """

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup | None = None,
        *,
        retention: Retention | None = None,
        second_tier: Path | None = None,
        second_tier_bytes: int | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Look at the checkpoints in `folder`. All ranks must call this.

        Args:
            folder: where the checkpoints lie; made at the first save.
            group: all ranks, or None for a single process.
            retention: which checkpoints stay; the newest three where nothing is said.
            second_tier: a faster folder, of each node or of all, in which saves are written first and
                copied to `folder` in the background. A folder for this run alone is made in it.
            second_tier_bytes: how much may lie there on a node; half of its file system if None.
            patience_s: how long a disk may take nothing before a save is given up, in seconds.
        """
        self._agreement = Agreement(group, patience_s + _MARGIN_S)
        self._site = Site(
            self._agreement, Place(folder), leads=self._agreement.is_main, patience_s=patience_s
        )
        self._saving = Saving(self._site, retention or Retention())
        self._tier: Tier | None = None
        if second_tier is not None:
            self._tier, problem = Tier.open(
                second_tier,
                self._site,
                Agreement(group, patience_s + _MARGIN_S),
                limit_bytes=second_tier_bytes,
                on_copied=self._saving.reached_shared,
                on_failure=self._saving.failed_to_reach_shared,
            )
            self._saving.tier, self._saving.notes = self._tier, [problem] if problem else []
        self._camera = Camera(self._agreement)
        self._in_flight: Save | None = None
        self._at_exit = functools.partial(_leave, weakref.ref(self))
        atexit.register(self._at_exit)  # before the process group is left, which was joined earlier

    def prepare(self, state: Any, rank_state: Mapping[str, torch.Tensor]) -> None:
        """Allocate, in the background, the memory into which `begin` copies a state of these shapes.

        Without it the first `begin` does so. While a save is in flight, nothing is done.

        Raises:
            CheckpointError: a value cannot be stored.
        """
        if self.finish(0.0):
            self._camera.prepare(state, rank_state)

    def begin(
        self, step: int, state: Any, rank_state: Mapping[str, torch.Tensor], *, score: float | None = None
    ) -> None:
        """Copy the state and return; it is written and committed in the background. All ranks must call this.

        Where an earlier save is still being written, this waits for it first. How a save ended is told by
        `finished`; nothing is raised here, whatever goes wrong.

        Args:
            step: number of completed optimizer steps.
            state: nested dicts, lists, tuples, numbers, texts and tensors; equal on all ranks, but for what
                is sharded (DTensor, ShardedTensor).
            rank_state: tensors of this rank alone.
            score: how good the state is, where the best are to be kept.
        """
        self._begin(step, state, rank_state, score, direct=False)

    def save(
        self, step: int, state: Any, rank_state: Mapping[str, torch.Tensor], *, score: float | None = None
    ) -> Saved:
        """Write and commit the state after `step` steps. All ranks must call this.

        It is in `folder` on return, not only in the second tier. The arguments are those of `begin`.

        Raises:
            CheckpointError: on all ranks alike, where any rank could not write its part. Nothing was
                committed, and the checkpoints that were there are untouched.
        """
        save = self._begin(step, state, rank_state, score, direct=True)
        self._join(save)
        self._saving.forget(save.outcome)
        if isinstance(save.outcome, CheckpointError):
            raise save.outcome
        assert save.outcome is not None
        return save.outcome

    def finished(self) -> list[Saved | CheckpointError]:
        """How the saves ended that did so since the last call. Never waits.

        With a second tier, a checkpoint is told of again when it has reached `folder`.
        """
        return self._saving.ended()

    def finish(self, timeout_s: float) -> bool:
        """Wait so long for the save in flight, and say whether there is none any more."""
        save = self._in_flight
        if save is None or save.thread is None:
            return True
        save.thread.join(timeout_s)
        return not save.thread.is_alive()

    def abandon(self) -> None:
        """Have all ranks give up the save in flight, unless it is being committed already. Does not wait."""
        if self._in_flight is not None:
            self._in_flight.give_up.set()

    def close(self, *, clean: bool = False, timeout_s: float | None = None) -> list[str]:
        """End what goes on in the background. All ranks must call this, with the same arguments.

        The save in flight is waited for, and so is the copy from the second tier.

        Args:
            clean: remove what lies in the second tier, if its newest has reached `folder`.
            timeout_s: after this time, in seconds, what is still going on is given up.

        Returns:
            Sentences about what did not go as it should.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._in_flight is not None:
            self._join(self._in_flight, timeout_s)
        notes = [] if self._tier is None else self._tier.close(deadline, clean=clean)
        atexit.unregister(self._at_exit)
        return notes

    def bring_home(self, timeout_s: float) -> list[str]:
        """Copy what only the tier has to `folder`, remove the tier, and close. All ranks must call this.

        Args:
            timeout_s: after this time, in seconds, copying is given up.

        Returns:
            Sentences about what did not go as it should.

        Raises:
            CheckpointError: on all ranks alike: what is there cannot be told now. Nothing was changed.
        """
        if self._tier is None:
            return self.close()
        _, broken = newest_whole(self._site, self._tier)
        return [*broken, *self.close(clean=True, timeout_s=timeout_s)]

    def load_newest(self, like: Any = None) -> tuple[Loaded | None, list[str]]:
        """Load the newest checkpoint that is whole. All ranks must call this.

        Broken newer ones are set aside, never deleted. Each rank checks its share of the files.

        Args:
            like: a state as it is saved. Where that holds distributed tensors, tensors of the same
                distribution are loaded: that of the same path or, where `like` has one in place of a
                container, those in it that have its size. All others come whole, on the CPU.

        Returns:
            The checkpoint, or None where none is whole; and for each broken one a sentence that names it,
            says what is wrong, and where it lies now.

        Raises:
            CheckpointError: on all ranks alike: a checkpoint cannot be read now, or is of another format.
                Nothing was changed.
        """
        if self._in_flight is not None:
            self._join(self._in_flight)
        found, broken = newest_whole(self._site, self._tier)
        return load(self._agreement, found, like) if found else None, broken

    def add_score(self, step: int, score: float) -> None:
        """Say how good the checkpoint of a step in `folder` is, after it was written. On rank 0 alone.

        Raises:
            CheckpointError: it cannot be read.
            OSError: its manifest cannot be written; it stands as it was.
        """
        self._site.place.add_score(step, score)

    def _begin(
        self,
        step: int,
        state: Any,
        rank_state: Mapping[str, torch.Tensor],
        score: float | None,
        *,
        direct: bool,
    ) -> Save:
        begun = time.monotonic()
        if self._in_flight is not None:
            self._join(self._in_flight)
        captured, problem = None, None
        try:
            if self._saving.hanging:
                raise CheckpointError("the disk still hangs on what an earlier save was writing")
            captured = self._camera.capture(state, rank_state)
        except Exception as error:  # noqa: BLE001 (all ranks are told, in the background)
            problem = reason(error)
        save = Save(step, score, begun, captured, problem, direct)
        save.thread = threading.Thread(
            target=self._saving.run, args=(save,), name="hpctrain-checkpoint", daemon=True
        )
        self._in_flight = save
        save.stall_s = time.monotonic() - begun
        save.thread.start()
        return save

    def _join(self, save: Save, timeout_s: float | None = None) -> None:
        """Wait for a save. Without a limit here, since everything that it waits for has one."""
        assert save.thread is not None
        save.thread.join(timeout_s)
        if save.thread.is_alive():
            save.give_up.set()
            save.thread.join()


def _leave(reference: weakref.ref[CheckpointStore]) -> None:
    """At the end of a process that did not close its store: leave nothing half done; wait briefly only."""
    store = reference()
    if store is not None:
        store.abandon()
        store.finish(_EXIT_LIMIT_S)
