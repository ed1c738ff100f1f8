"""Save and load the checkpoints of a run.

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
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.checkpoint.find_latest_valid import find_latest_valid, set_aside
from hpctrain.checkpoint.format.dcp_format import StoredChunk, build_tables, rank_file_name
from hpctrain.checkpoint.format.manifest import FileEntry, Manifest
from hpctrain.checkpoint.format.write_plan import WriteItem
from hpctrain.checkpoint.io.background_io import FileWriter, bytes_file_write
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir
from hpctrain.checkpoint.io.commit import CommitTarget, RankWrite, complete_files, write_and_commit
from hpctrain.checkpoint.io.coordination import PeerLost, RankCoordinator, SaveAborted, describe_exception
from hpctrain.checkpoint.io.loading import LoadedCheckpoint, list_shared_steps, load
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.staging import StagedState, StateStager
from hpctrain.checkpoint.tier.local_tier import LocalTier, TierCopyFailed
from hpctrain.checkpoint.tier.memory_copies import commit_newest_copy
from hpctrain.errors import CheckpointError
from hpctrain.rundir import checkpoint_folder_name

__all__ = ["CheckpointStore", "CommittedSave", "LoadedCheckpoint", "Retention", "TierCopyFailed"]

#: Time without disk progress after which a save is aborted, in seconds.
IO_TIMEOUT_S = 300.0
#: Additional time that a rank may block the others to create and rename folders, in seconds.
_MARGIN_S = 60.0
#: Time limit at process exit for aborting a save in flight, in seconds.
_EXIT_LIMIT_S = 10.0


@dataclass(frozen=True)
class CommittedSave:
    step: int
    path: Path
    total_bytes: int
    seconds: float
    """Seconds from the call of `async_save` or `save` to the commit, on this rank."""
    score: float | None = None
    finite: bool | None = True
    notes: tuple[str, ...] = ()


@dataclass
class PendingSave:
    step: int
    score: float | None
    started_at: float
    staged: StagedState | None
    problem: str | None
    direct: bool
    """True if the save bypasses the local tier."""
    verified_step: int | None = None
    time: float = field(default_factory=time.time)
    abort: threading.Event = field(default_factory=threading.Event)
    outcome: CommittedSave | CheckpointError | None = None
    thread: threading.Thread | None = None


class CheckpointStore:
    """The checkpoints in one folder; methods that save, load, set aside or close are collective."""

    def __init__(
        self,
        folder: Path,
        group: dist.ProcessGroup | None = None,
        *,
        retention: Retention | None = None,
        second_tier: Path | None = None,
        patience_s: float = IO_TIMEOUT_S,
        records: tuple[Path, ...] = (),
        checked: Callable[[str], bool] | None = None,
    ) -> None:
        """Open the checkpoints; tensors with `checked` keys must be finite."""
        self._coordinator = RankCoordinator(group is not None, patience_s + _MARGIN_S)
        self._target = CommitTarget(
            self._coordinator,
            CheckpointDir(folder, records=records),
            is_leader=self._coordinator.is_main,
            io_timeout_s=patience_s,
        )
        self._retention, self._checked = retention or Retention(), checked
        self._tier: LocalTier | None = None
        self._notes: list[str] = []
        if second_tier is not None:
            try:
                self._tier = LocalTier(
                    second_tier,
                    self._target,
                    RankCoordinator(group is not None, patience_s + _MARGIN_S),
                    on_copied=self._on_copied,
                    on_failure=self._report,
                )
            except CheckpointError as error:
                self._notes = [f"{error}. Checkpoints are written directly to {folder}."]
        self._stager = StateStager(self._coordinator)
        #: Layout of this rank's file that rank 0 has; the tables are rebuilt only after a change of a layout.
        self._sent_layout: tuple[WriteItem, ...] | None = None
        self._layouts: dict[int, list[tuple[Any, ...]]] = {}
        self._tables: dict[str, bytes] = {}
        #: The writer of the last save, if it still reads memory because its disk hangs.
        self._writer: FileWriter | None = None
        self._outcomes: list[CommittedSave | CheckpointError] = []
        self._lock = threading.Lock()
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
        """Copy the state, and write it in the background; `rank_state` is of this rank only."""
        begun = time.monotonic()
        if self._in_flight is not None:
            self._join(self._in_flight)
        staged, problem = None, None
        try:
            if self._writer is not None and not self._writer.ended.is_set():
                raise CheckpointError("an earlier save is still waiting for the disk")
            staged = self._stager.stage(state, rank_state)
            self.state_bytes = staged.staged_file.num_bytes
        except Exception as error:  # noqa: BLE001 (reported to all ranks in the background)
            problem = describe_exception(error)
        save = PendingSave(step, score, begun, staged, problem, direct, verified_step)
        save.thread = threading.Thread(
            target=self._run, args=(save,), name="hpctrain-checkpoint", daemon=True
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
        """Write the state to `folder`, not only to the local tier; raise errors on all ranks."""
        save = self.async_save(step, state, rank_state, score=score, verified_step=verified_step, direct=True)
        self._join(save)
        with self._lock:
            self._outcomes = [reported for reported in self._outcomes if reported is not save.outcome]
        if isinstance(save.outcome, CheckpointError):
            raise save.outcome
        assert save.outcome is not None
        return save.outcome

    def collect_outcomes(self) -> list[CommittedSave | CheckpointError]:
        """Return the outcomes since the last call, two for a checkpoint copied from the local tier."""
        with self._lock:
            ended, self._outcomes = self._outcomes, []
        return ended

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
        """Finish the background work; `clean` removes a copied local tier; return messages."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._in_flight is not None:
            self._join(self._in_flight, timeout_s)
        notes = [] if self._tier is None else self._tier.close(deadline, clean=clean)
        atexit.unregister(self._at_exit)
        return notes

    def drain(self, timeout_s: float) -> list[str]:
        """Copy missing checkpoints from the local tier, delete it, and close."""
        if self._tier is None:
            return self.close()
        _, broken = find_latest_valid(self._target, self._tier)
        return [*broken, *self.close(clean=True, timeout_s=timeout_s)]

    def load_newest(self, like: Any = None) -> tuple[LoadedCheckpoint | None, list[str]]:
        """Load the newest valid checkpoint, preferably finite, distributed as `like`."""
        if self._in_flight is not None:
            self._join(self._in_flight)
        newest, broken = find_latest_valid(self._target, self._tier)
        return load(self._coordinator, newest, like) if newest else None, broken

    def commit_newest_copy(self, folder: Path, limit: int | None = None) -> str | None:
        return commit_newest_copy(folder, self._target, self._checked, limit)

    def set_aside_after(self, step: int) -> list[str]:
        """Set aside the checkpoints after `step`, whose states may be wrong."""
        tiers = [(self._target, set(list_shared_steps(self._target)))]
        if self._tier is not None:
            tiers.append((self._tier.target, set(self._tier.gather_node_files())))
        sentences = []
        for target, steps in tiers:
            for later in sorted(saved_step for saved_step in steps if saved_step > step):
                folder = target.directory.folder / checkpoint_folder_name(later)
                problem = f"{folder} was saved after step {step}, the last verified step."
                sentences.append(set_aside(target, later, problem, "unverified"))
        return sentences

    def add_score(self, step: int, score: float) -> None:
        self._target.directory.add_score(step, score, self._retention.metric)

    def _join(self, save: PendingSave, timeout_s: float | None = None) -> None:
        assert save.thread is not None
        save.thread.join(timeout_s)
        if save.thread.is_alive():
            save.abort.set()
            save.thread.join()

    def _run(self, save: PendingSave) -> None:
        try:
            save.outcome = self._save(save)
        except CheckpointError as error:
            save.outcome = error
        except Exception as error:  # noqa: BLE001 (stored as the outcome)
            save.outcome = CheckpointError(
                f"the checkpoint of step {save.step} was not written: {describe_exception(error)}"
            )
        save.staged = None
        self._report(save.outcome)

    def _report(self, outcome: CommittedSave | CheckpointError) -> None:
        with self._lock:
            self._outcomes.append(outcome)

    def _on_copied(self, manifest: Manifest, begun: float) -> None:
        self._report(_describe_save(self._target.directory, manifest, begun, self._prune(manifest.step)))

    def _save(self, save: PendingSave) -> CommittedSave:
        self._coordinator.raise_on_all(save.problem, f"the checkpoint of step {save.step} was not written")
        assert save.staged is not None
        notes, self._notes = self._notes, []
        if self._tier is not None and not save.direct:
            try:
                self._tier.make_room(save.staged.staged_file.num_bytes)
                manifest = self._commit(save, save.staged, self._tier.target)
            except (PeerLost, SaveAborted):
                raise
            except CheckpointError as error:
                notes.append(
                    f"{error}. The checkpoint was written to {self._target.directory.folder} instead."
                )
            else:
                self._tier.schedule_copy(save.step, may_skip=self._retention.may_skip(save.step, save.score))
                return _describe_save(self._tier.target.directory, manifest, save.started_at, notes)
        manifest = self._commit(save, save.staged, self._target)
        notes += self._prune(save.step)
        return _describe_save(self._target.directory, manifest, save.started_at, notes)

    def _commit(self, save: PendingSave, staged: StagedState, target: CommitTarget) -> Manifest:
        staged_file, rank = staged.staged_file, self._coordinator.rank
        layout = None
        if self._sent_layout != staged_file.items:
            layout = [*map(astuple, staged_file.chunks(rank))]
        # If the save fails, rank 0 may not have received the layout.
        self._sent_layout = None

        def seal(
            entries: list[FileEntry], remarks: list[tuple[list[tuple[Any, ...]] | None, bool]]
        ) -> dict[str, bytes]:
            changed = {rank: new for rank, (new, _) in enumerate(remarks) if new is not None}
            if changed:
                self._layouts.update(changed)
                self._tables = build_tables(
                    StoredChunk(*chunk) for rank in sorted(self._layouts) for chunk in self._layouts[rank]
                )
            return complete_files(
                self._tables,
                staged.plain,
                entries,
                step=save.step,
                world_size=self._coordinator.world_size,
                time=save.time,
                score=save.score,
                finite=None if self._checked is None else all(finite for _, finite in remarks),
                verified_step=save.verified_step,
                metric=None if save.score is None else self._retention.metric,
            )

        write = RankWrite(
            [bytes_file_write(rank_file_name(rank), staged_file.content)] if staged_file.content else [],
            seal,
            remark=lambda: (layout, self._checked is None or staged_file.is_finite(self._checked)),
            fingerprint=staged.fingerprint,
            ready=staged.ready,
            abort=save.abort,
        )
        try:
            manifest = write_and_commit(target, save.step, write)
        finally:
            # Drop a finished writer, so that its memory can be freed for a larger state.
            self._writer = None if write.writer is None or write.writer.ended.is_set() else write.writer
        self._sent_layout = staged_file.items
        return manifest

    def _prune(self, newest: int) -> list[str]:
        if not self._coordinator.is_main:
            return []
        pruning = self._target.io_thread.submit(lambda: self._target.directory.prune(newest, self._retention))
        pruning.wait(self._target.io_timeout_s)
        if pruning.error:  # the new checkpoint is committed anyway
            return [f"No old checkpoint was deleted: {pruning.error}."]
        return pruning.result or []


def _describe_save(
    directory: CheckpointDir, manifest: Manifest, begun: float, notes: list[str]
) -> CommittedSave:
    return CommittedSave(
        step=manifest.step,
        path=directory.folder / checkpoint_folder_name(manifest.step),
        total_bytes=manifest.total_bytes,
        seconds=time.monotonic() - begun,
        score=manifest.score,
        finite=manifest.finite,
        notes=tuple(notes),
    )


def _abandon_at_exit(reference: weakref.ref[CheckpointStore]) -> None:
    """Abort a save in flight if a process exits without closing its store, with a short wait."""
    store = reference()
    if store is not None:
        store.abandon()
        store.wait(_EXIT_LIMIT_S)
