"""Writing and finding the checkpoints of a run.

A checkpoint is a folder in the format of `torch.distributed.checkpoint`, plus `state.json` (everything except
tensors), `tensors.json` (the location of each tensor) and `manifest.json`. Each rank writes its share in the
background, from a staged copy of the state; `commit` describes how the parts become a checkpoint.
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

from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir
from hpctrain.checkpoint.io.commit import CommitTarget
from hpctrain.checkpoint.io.coordination import RankCoordinator, describe_exception
from hpctrain.checkpoint.io.loading import (
    LoadedCheckpoint,
    VerifiedCheckpoint,
    check_shared,
    list_shared_steps,
    load,
)
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.save_types import CommittedSave, PendingSave
from hpctrain.checkpoint.saver import Saver
from hpctrain.checkpoint.staging import StateStager
from hpctrain.checkpoint.tier.local_tier import LocalTier
from hpctrain.checkpoint.tier.tier_copier import TierCopyFailed
from hpctrain.errors import CheckpointError, CorruptCheckpoint

__all__ = ["CheckpointStore", "CommittedSave", "LoadedCheckpoint", "Retention", "TierCopyFailed"]

#: Time without disk progress after which a save is given up, in seconds.
IO_TIMEOUT_S = 300.0
#: Additional time for which a rank may block the others, to create and rename folders, in seconds.
_MARGIN_S = 60.0
#: Time for which the exiting process waits until a save in flight has been given up, in seconds.
_EXIT_LIMIT_S = 10.0


class CheckpointStore:
    """The checkpoints in one folder.

    All ranks of `group` must call the constructor, `begin`, `save`, `bring_home`, `load_newest` and `close`
    in the same order; each rank may call the other methods alone.
    """

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup | None = None,
        *,
        retention: Retention | None = None,
        second_tier: Path | None = None,
        second_tier_bytes: int | None = None,
        patience_s: float = IO_TIMEOUT_S,
        records: tuple[Path, ...] = (),
    ) -> None:
        """Open the checkpoints in `folder`. All ranks must call this.

        Args:
            folder: the folder of checkpoints; created by the first save.
            group: all ranks, or None for a single process.
            retention: the checkpoints to keep; the newest three by default.
            second_tier: a faster folder, per node or shared, for the local tier: saves are written there
                first and copied to `folder` in the background. A subfolder is created for this run.
            second_tier_bytes: capacity of that subfolder per node; half of its file system if None.
            patience_s: time without disk progress after which a save is given up, in seconds.
            records: files that rank 0 writes; see `CheckpointDir`.
        """
        self._agreement = RankCoordinator(group, patience_s + _MARGIN_S)
        self._site = CommitTarget(
            self._agreement,
            CheckpointDir(folder, records=records),
            leads=self._agreement.is_main,
            patience_s=patience_s,
        )
        self._saving = Saver(self._site, retention or Retention())
        self._tier: LocalTier | None = None
        if second_tier is not None:
            self._tier, problem = LocalTier.open(
                second_tier,
                self._site,
                RankCoordinator(group, patience_s + _MARGIN_S),
                limit_bytes=second_tier_bytes,
                on_copied=self._saving.reached_shared,
                on_failure=self._saving.failed_to_reach_shared,
            )
            self._saving.tier, self._saving.notes = self._tier, [problem] if problem else []
        self._camera = StateStager(self._agreement)
        self._in_flight: PendingSave | None = None
        #: Size of this rank's share of the latest state, in bytes.
        self.state_bytes = 0
        self._at_exit = functools.partial(_leave, weakref.ref(self))
        atexit.register(self._at_exit)  # runs before the earlier registered exit handler of the process group

    def prepare(self, state: Any, rank_state: Mapping[str, torch.Tensor]) -> None:
        """Allocate, in the background, the memory into which `begin` copies a state of these shapes.

        Without this call, the first `begin` allocates it. Does nothing while a save is in flight.

        Raises:
            CheckpointError: a value cannot be stored.
        """
        if self.finish(0.0):
            self._camera.prepare(state, rank_state)

    def begin(
        self, step: int, state: Any, rank_state: Mapping[str, torch.Tensor], *, score: float | None = None
    ) -> None:
        """Copy the state and return; write and commit it in the background. All ranks must call this.

        If an earlier save is still being written, this waits for it first. Raises nothing; `finished` reports
        the outcome.

        Args:
            step: number of completed optimizer steps.
            state: nested dicts, lists, tuples, numbers, strings and tensors; equal on all ranks except for
                sharded tensors (DTensor, ShardedTensor).
            rank_state: tensors of this rank alone.
            score: quality of the state, if the best checkpoints are to be kept.
        """
        self._begin(step, state, rank_state, score, direct=False)

    def save(
        self, step: int, state: Any, rank_state: Mapping[str, torch.Tensor], *, score: float | None = None
    ) -> CommittedSave:
        """Write and commit the state after `step` steps. All ranks must call this.

        On return it is in `folder`, not only in the local tier. The arguments are those of `begin`.

        Raises:
            CheckpointError: on all ranks, if any rank could not write its part. Nothing was committed, and
                earlier checkpoints are unchanged.
        """
        save = self._begin(step, state, rank_state, score, direct=True)
        self._join(save)
        self._saving.forget(save.outcome)
        if isinstance(save.outcome, CheckpointError):
            raise save.outcome
        assert save.outcome is not None
        return save.outcome

    def finished(self) -> list[CommittedSave | CheckpointError]:
        """Return the outcomes of saves since the last call. Never waits.

        With a local tier, a checkpoint is reported again when it has reached `folder`.
        """
        return self._saving.ended()

    def finish(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the save in flight; return True if none is left."""
        save = self._in_flight
        if save is None or save.thread is None:
            return True
        save.thread.join(timeout_s)
        return not save.thread.is_alive()

    def abandon(self) -> None:
        """Have all ranks give up the save in flight, unless it is already being committed. Does not wait."""
        if self._in_flight is not None:
            self._in_flight.give_up.set()

    def close(self, *, clean: bool = False, timeout_s: float | None = None) -> list[str]:
        """Finish the background work. All ranks must call this, with the same arguments.

        This waits for the save in flight and for copies from the local tier.

        Args:
            clean: delete the run's local tier if its newest checkpoint has reached `folder`.
            timeout_s: time after which unfinished work is given up, in seconds.

        Returns:
            Sentences about problems.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._in_flight is not None:
            self._join(self._in_flight, timeout_s)
        notes = [] if self._tier is None else self._tier.close(deadline, clean=clean)
        atexit.unregister(self._at_exit)
        return notes

    def bring_home(self, timeout_s: float) -> list[str]:
        """Copy missing checkpoints from the local tier, delete it, and close. All ranks must call this.

        Args:
            timeout_s: time after which copying is given up, in seconds.

        Returns:
            Sentences about problems.

        Raises:
            CheckpointError: on all ranks: a checkpoint cannot be checked at the moment. It is left unchanged.
        """
        if self._tier is None:
            return self.close()
        _, broken = find_latest_valid(self._site, self._tier)
        return [*broken, *self.close(clean=True, timeout_s=timeout_s)]

    def load_newest(self, like: Any = None) -> tuple[LoadedCheckpoint | None, list[str]]:
        """Load the newest valid checkpoint. All ranks must call this.

        Broken newer ones are set aside, never deleted. Each rank checks its share of the files.

        Args:
            like: a state with the structure of the saved one. A tensor is loaded with the distribution of the
                distributed tensor at its path in `like`. If `like` has a distributed tensor in place of a
                container, it applies to the tensors of the same size in that container. All other tensors are
                loaded whole, on the CPU.

        Returns:
            The checkpoint, or None if none is valid; and for each broken one a sentence with its name, the
                problem and its new location.

        Raises:
            CheckpointError: on all ranks: a checkpoint cannot be read at the moment, or has another format.
                It is left unchanged.
        """
        if self._in_flight is not None:
            self._join(self._in_flight)
        found, broken = find_latest_valid(self._site, self._tier)
        return load(self._agreement, found, like) if found else None, broken

    def add_score(self, step: int, score: float) -> None:
        """Record the score of a committed checkpoint in `folder`. Call this on rank 0 only.

        Raises:
            CheckpointError: it cannot be read.
            OSError: its manifest cannot be written and is unchanged.
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
    ) -> PendingSave:
        begun = time.monotonic()
        if self._in_flight is not None:
            self._join(self._in_flight)
        captured, problem = None, None
        try:
            if self._saving.hanging:
                raise CheckpointError("the disk is still hanging on an earlier save")
            captured = self._camera.capture(state, rank_state)
            self.state_bytes = captured.image.num_bytes
        except Exception as error:  # noqa: BLE001 (reported to all ranks in the background)
            problem = describe_exception(error)
        save = PendingSave(step, score, begun, captured, problem, direct)
        save.thread = threading.Thread(
            target=self._saving.run, args=(save,), name="hpctrain-checkpoint", daemon=True
        )
        self._in_flight = save
        save.thread.start()
        return save

    def _join(self, save: PendingSave, timeout_s: float | None = None) -> None:
        """Wait for a save. It needs no timeout by default, because all of its own waits have one."""
        assert save.thread is not None
        save.thread.join(timeout_s)
        if save.thread.is_alive():
            save.give_up.set()
            save.thread.join()


def _leave(reference: weakref.ref[CheckpointStore]) -> None:
    """Give up a save in flight when a process exits without closing its store; wait only briefly."""
    store = reference()
    if store is not None:
        store.abandon()
        store.finish(_EXIT_LIMIT_S)


def find_latest_valid(
    site: CommitTarget, tier: LocalTier | None
) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """Find the newest valid checkpoint; set broken newer ones aside. All ranks must call this.

    Returns:
        The checkpoint or None, and for each broken one a sentence with its name, the problem and its new
            location.

    Raises:
        CheckpointError: on all ranks: a checkpoint cannot be checked at the moment. It is left unchanged.
    """
    shared, held = set(list_shared_steps(site)), {} if tier is None else tier.holdings()
    broken: list[str] = []
    found: VerifiedCheckpoint | None = None
    for step in sorted(shared | held.keys(), reverse=True):
        if step in shared:
            try:
                found = check_shared(site, step)
                break
            except CorruptCheckpoint as error:
                broken.append(_set_aside(site, site.place, step, str(error)))
        if tier is not None and step in held:
            try:
                found = tier.find(step, held[step])
                break
            except CorruptCheckpoint as error:
                broken.append(_set_aside(tier.site, tier.site.place, step, str(error)))
    if tier is not None:
        tier.start_from(found)
    return found, broken


def _set_aside(site: CommitTarget, place: CheckpointDir, step: int, problem: str) -> str:
    def rename() -> str | None:
        # A node that has no part of it has nothing to rename.
        if not site.leads or step not in place.steps():
            return None
        return place.set_aside(step).name

    name = site.agreement.together(rename, f"{problem} It cannot be set aside")
    names = site.agreement.all(name, "setting a checkpoint aside")
    aside = next(filter(None, names), None)
    return f"{problem} It was set aside as {aside}." if aside else f"{problem} It has been deleted since."
