"""Saving and loading of a run's checkpoints.

A checkpoint is a folder in the format of `torch.distributed.checkpoint`, plus `state.json` (everything except
tensors), `tensors.json` (the location of each tensor) and `manifest.json`. Each rank writes its share in the
background, from a staged copy of the state. See `commit` for the commit protocol.
"""

from __future__ import annotations

import atexit
import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir, Retention
from hpctrain.checkpoint.io.commit import CommitTarget
from hpctrain.checkpoint.io.coordination import RankCoordinator, describe_exception
from hpctrain.checkpoint.io.loading import (
    LoadedCheckpoint,
    VerifiedCheckpoint,
    check_shared,
    list_shared_steps,
    load,
)
from hpctrain.checkpoint.saver import CommittedSave, PendingSave, Saver
from hpctrain.checkpoint.staging import StateStager
from hpctrain.checkpoint.tier.local_tier import LocalTier
from hpctrain.checkpoint.tier.memory_copies import commit_newest_copy
from hpctrain.checkpoint.tier.tier_copier import TierCopyFailed
from hpctrain.errors import CheckpointError, CorruptCheckpoint
from hpctrain.rundir import checkpoint_folder_name

__all__ = ["CheckpointStore", "CommittedSave", "LoadedCheckpoint", "Retention", "TierCopyFailed"]

#: Time without disk progress after which a save is aborted, in seconds.
IO_TIMEOUT_S = 300.0
#: Additional time that a rank may block the others to create and rename folders, in seconds.
_MARGIN_S = 60.0
#: Time limit at process exit for aborting a save in flight, in seconds.
_EXIT_LIMIT_S = 10.0


class CheckpointStore:
    """The checkpoints in one folder; methods that save, load, drain or close are collective."""

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
        checked: Callable[[str], bool] | None = None,
    ) -> None:
        """Open the checkpoints; tensors with `checked` keys must be finite (collective)."""
        self._coordinator = RankCoordinator(group, patience_s + _MARGIN_S)
        self._target = CommitTarget(
            self._coordinator,
            CheckpointDir(folder, records=records),
            is_leader=self._coordinator.is_main,
            io_timeout_s=patience_s,
        )
        self._retention, self._checked = retention or Retention(), checked
        self._saver = Saver(self._target, self._retention, checked)
        self._tier: LocalTier | None = None
        if second_tier is not None:
            try:
                self._tier = self._saver.local_tier = LocalTier(
                    second_tier,
                    self._target,
                    RankCoordinator(group, patience_s + _MARGIN_S),
                    limit_bytes=second_tier_bytes,
                    on_copied=self._saver.on_copied,
                    on_failure=self._saver.report,
                )
            except CheckpointError as error:
                self._saver.notes = [f"{error}. Checkpoints are written directly to {folder}."]
        self._stager = StateStager(self._coordinator)
        self._in_flight: PendingSave | None = None
        #: Size of this rank's share of the latest state, in bytes.
        self.state_bytes = 0
        self._at_exit = functools.partial(_abandon_at_exit, weakref.ref(self))
        # Runs before the exit handler of the process group, which was registered earlier.
        atexit.register(self._at_exit)

    def prepare(self, state: Any, rank_state: Mapping[str, torch.Tensor]) -> None:
        if self.wait(0.0):
            self._stager.prepare(state, rank_state)

    def async_save(
        self,
        step: int,
        state: Any,
        rank_state: Mapping[str, torch.Tensor],
        *,
        score: float | None = None,
        verified_step: int | None = None,
        direct: bool = False,
    ) -> PendingSave:
        """Copy the state, and write it in the background; `rank_state` is of this rank only (collective)."""
        begun = time.monotonic()
        if self._in_flight is not None:
            self._join(self._in_flight)
        staged, problem = None, None
        try:
            if self._saver.hung_writer:
                raise CheckpointError("an earlier save is still waiting for the disk")
            staged = self._stager.stage(state, rank_state)
            self.state_bytes = staged.staged_file.num_bytes
        except Exception as error:  # noqa: BLE001 (reported to all ranks in the background)
            problem = describe_exception(error)
        save = PendingSave(step, score, begun, staged, problem, direct, verified_step)
        save.thread = threading.Thread(
            target=self._saver.run, args=(save,), name="hpctrain-checkpoint", daemon=True
        )
        self._in_flight = save
        save.thread.start()
        return save

    def save(
        self,
        step: int,
        state: Any,
        rank_state: Mapping[str, torch.Tensor],
        *,
        score: float | None = None,
        verified_step: int | None = None,
    ) -> CommittedSave:
        """Write the state to `folder`, not only to the local tier; raise errors on all ranks (collective)."""
        save = self.async_save(step, state, rank_state, score=score, verified_step=verified_step, direct=True)
        self._join(save)
        self._saver.drop_outcome(save.outcome)
        if isinstance(save.outcome, CheckpointError):
            raise save.outcome
        assert save.outcome is not None
        return save.outcome

    def collect_outcomes(self) -> list[CommittedSave | CheckpointError]:
        """Return the outcomes since the last call, two for a checkpoint copied from the local tier."""
        return self._saver.collect_outcomes()

    def wait(self, timeout_s: float) -> bool:
        save = self._in_flight
        if save is None or save.thread is None:
            return True
        save.thread.join(timeout_s)
        return not save.thread.is_alive()

    def abandon(self) -> None:
        """Abort the save in flight on all ranks, unless the commit has begun."""
        if self._in_flight is not None:
            self._in_flight.abort.set()

    def close(self, *, clean: bool = False, timeout_s: float | None = None) -> list[str]:
        """Finish the background work; `clean` removes a copied local tier; return messages (collective)."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._in_flight is not None:
            self._join(self._in_flight, timeout_s)
        notes = [] if self._tier is None else self._tier.close(deadline, clean=clean)
        atexit.unregister(self._at_exit)
        return notes

    def drain(self, timeout_s: float) -> list[str]:
        """Copy missing checkpoints from the local tier, delete it, and close (collective)."""
        if self._tier is None:
            return self.close()
        _, broken = find_latest_valid(self._target, self._tier)
        return [*broken, *self.close(clean=True, timeout_s=timeout_s)]

    def load_newest(self, like: Any = None) -> tuple[LoadedCheckpoint | None, list[str]]:
        """Load the newest valid checkpoint, preferably finite, distributed as `like` (collective)."""
        if self._in_flight is not None:
            self._join(self._in_flight)
        newest, broken = find_latest_valid(self._target, self._tier)
        return load(self._coordinator, newest, like) if newest else None, broken

    def commit_newest_copy(self, folder: Path, limit: int | None = None) -> str | None:
        """Collective."""
        return commit_newest_copy(folder, self._target, self._checked, limit)

    def set_aside_after(self, step: int) -> list[str]:
        """Set aside the checkpoints after `step`, whose states may be wrong (collective)."""
        tiers = [(self._target, set(list_shared_steps(self._target)))]
        if self._tier is not None:
            tiers.append((self._tier.target, set(self._tier.gather_node_files())))
        sentences = []
        for target, steps in tiers:
            for later in sorted(saved_step for saved_step in steps if saved_step > step):
                folder = target.directory.folder / checkpoint_folder_name(later)
                problem = f"{folder} was saved after step {step}, the last verified step."
                sentences.append(_set_aside(target, target.directory, later, problem, "unverified"))
        return sentences

    def add_score(self, step: int, score: float) -> None:
        self._target.directory.add_score(step, score, self._retention.metric)

    def _join(self, save: PendingSave, timeout_s: float | None = None) -> None:
        assert save.thread is not None
        save.thread.join(timeout_s)
        if save.thread.is_alive():
            save.abort.set()
            save.thread.join()


def _abandon_at_exit(reference: weakref.ref[CheckpointStore]) -> None:
    """Abort a save in flight if a process exits without closing its store, with a short wait."""
    store = reference()
    if store is not None:
        store.abandon()
        store.wait(_EXIT_LIMIT_S)


def find_latest_valid(
    target: CommitTarget, tier: LocalTier | None
) -> tuple[VerifiedCheckpoint | None, list[str]]:
    """Find the newest valid checkpoint, preferably a finite one; set newer ones aside (collective)."""
    shared, held = set(list_shared_steps(target)), {} if tier is None else tier.gather_node_files()
    broken: list[str] = []
    checkpoint: VerifiedCheckpoint | None = None
    not_finite: list[VerifiedCheckpoint] = []
    for step in sorted(shared | held.keys(), reverse=True):
        if step in shared:
            try:
                checkpoint = check_shared(target, step)
            except CorruptCheckpoint as error:
                broken.append(_set_aside(target, target.directory, step, str(error)))
        if checkpoint is None and tier is not None and step in held:
            try:
                checkpoint = tier.find(step, held[step])
            except CorruptCheckpoint as error:
                broken.append(_set_aside(tier.target, tier.target.directory, step, str(error)))
        if checkpoint is None:
            continue
        if checkpoint.manifest.finite is not False:
            break
        not_finite.append(checkpoint)
        checkpoint = None
    if checkpoint is None and not_finite:
        checkpoint = not_finite[0]
    else:
        for skipped in not_finite:
            problem = (
                f"{skipped.folder} contains NaN or infinite values in the parameters or the optimizer state."
            )
            if tier is not None and (step := skipped.manifest.step) in held:
                moved = _set_aside(tier.target, tier.target.directory, step, problem)
            if skipped.folder.parent == target.directory.folder:
                moved = _set_aside(target, target.directory, skipped.manifest.step, problem)
            broken.append(moved)
    if tier is not None:
        tier.reset_to(checkpoint)
    return checkpoint, broken


def _set_aside(
    target: CommitTarget, directory: CheckpointDir, step: int, problem: str, suffix: str = "broken"
) -> str:
    def rename() -> str | None:
        # A node without a part of the checkpoint has nothing to rename.
        if not target.is_leader or step not in directory.steps():
            return None
        return directory.quarantine(step, suffix).name

    name = target.coordinator.run_on_all(rename, f"{problem} The checkpoint cannot be renamed")
    names = target.coordinator.all_gather(name, "setting a checkpoint aside")
    aside = next(filter(None, names), None)
    outcome = f"renamed to {aside}" if aside else "deleted in the meantime"
    return f"{problem} The checkpoint was {outcome}."
