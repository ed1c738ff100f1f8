"""Background execution of saves: the target tier, the commit, and the report of each outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.format.dcp_format import StoredChunk, build_tables, rank_file_name, stored_chunks
from hpctrain.checkpoint.format.manifest import FileEntry, Manifest
from hpctrain.checkpoint.format.write_plan import WriteItem
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir, Retention
from hpctrain.checkpoint.io.commit import CommitTarget, RankWrite, complete_files, write_and_commit
from hpctrain.checkpoint.io.coordination import PeerLost, SaveAborted, describe_exception
from hpctrain.checkpoint.io.file_writer import FileWriter, bytes_file_write
from hpctrain.checkpoint.staging import StagedState
from hpctrain.checkpoint.tier.local_tier import LocalTier
from hpctrain.errors import CheckpointError
from hpctrain.rundir import checkpoint_folder_name


@dataclass(frozen=True)
class CommittedSave:
    step: int
    path: Path
    total_bytes: int
    seconds: float
    """Seconds from the call of `async_save` or `save` to the commit, on this rank."""
    score: float | None = None
    finite: bool | None = True
    world_size: int = 1
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
        world_size=manifest.world_size,
        notes=tuple(notes),
    )


#: The file entries of a rank, the layout if changed, and True if the part of the state is finite.
_Contribution = tuple[list[FileEntry], tuple[list[tuple[Any, ...]] | None, bool]]


class Saver:
    def __init__(
        self, target: CommitTarget, retention: Retention, checked: Callable[[str], bool] | None
    ) -> None:
        self._target, self._retention, self._coordinator = target, retention, target.coordinator
        self._checked = checked
        self.local_tier: LocalTier | None = None
        self.notes: list[str] = []
        #: Layout of this rank's file that rank 0 has; the tables are rebuilt only after a change of a layout.
        self._sent_layout: tuple[WriteItem, ...] | None = None
        self._layouts: dict[int, list[tuple[Any, ...]]] = {}
        self._tables: dict[str, bytes] = {}
        self._writer: FileWriter | None = None
        self._outcomes: list[CommittedSave | CheckpointError] = []
        self._lock = threading.Lock()

    @property
    def hung_writer(self) -> FileWriter | None:
        """The writer of an earlier save that still reads memory because its disk hangs; usually None."""
        return None if self._writer is None or self._writer.ended.is_set() else self._writer

    def run(self, save: PendingSave) -> None:
        """Write and commit `save`; store the outcome for `collect_outcomes` (collective)."""
        try:
            save.outcome = self._save(save)
        except CheckpointError as error:
            save.outcome = error
        except Exception as error:  # noqa: BLE001 (stored as the outcome)
            save.outcome = CheckpointError(
                f"the checkpoint of step {save.step} was not written: {describe_exception(error)}"
            )
        save.staged = None
        self.report(save.outcome)

    def collect_outcomes(self) -> list[CommittedSave | CheckpointError]:
        with self._lock:
            ended, self._outcomes = self._outcomes, []
        return ended

    def drop_outcome(self, outcome: CommittedSave | CheckpointError | None) -> None:
        """Remove `outcome` from the reports: the caller already has it."""
        with self._lock:
            self._outcomes = [reported for reported in self._outcomes if reported is not outcome]

    def on_copied(self, manifest: Manifest, begun: float) -> None:
        self.report(_describe_save(self._target.directory, manifest, begun, self._prune(manifest.step)))

    def report(self, outcome: CommittedSave | CheckpointError) -> None:
        with self._lock:
            self._outcomes.append(outcome)

    def _save(self, save: PendingSave) -> CommittedSave:
        self._coordinator.raise_on_all(save.problem, f"the checkpoint of step {save.step} was not written")
        assert save.staged is not None
        notes, self.notes = self.notes, []
        if self.local_tier is not None and not save.direct:
            try:
                self.local_tier.make_room(save.staged.staged_file.num_bytes)
                manifest = self._commit(save, save.staged, self.local_tier.target)
            except (PeerLost, SaveAborted):
                raise
            except CheckpointError as error:
                notes.append(
                    f"{error}. The checkpoint was written to {self._target.directory.folder} instead."
                )
            else:
                self.local_tier.schedule_copy(
                    save.step, may_skip=self._retention.may_skip(save.step, save.score)
                )
                return _describe_save(self.local_tier.target.directory, manifest, save.started_at, notes)
        manifest = self._commit(save, save.staged, self._target)
        notes += self._prune(save.step)
        return _describe_save(self._target.directory, manifest, save.started_at, notes)

    def _commit(self, save: PendingSave, staged: StagedState, target: CommitTarget) -> Manifest:
        staged_file, rank = staged.staged_file, self._coordinator.rank
        layout = None
        if self._sent_layout != staged_file.items:
            layout = [*map(astuple, stored_chunks(staged_file, rank))]
        # If the save fails, rank 0 may not have received the layout.
        self._sent_layout = None

        def seal(contributions: list[_Contribution]) -> dict[str, bytes]:
            changed = {rank: new for rank, (_, (new, _)) in enumerate(contributions) if new is not None}
            if changed:
                self._layouts.update(changed)
                self._tables = build_tables(
                    StoredChunk(*chunk) for rank in sorted(self._layouts) for chunk in self._layouts[rank]
                )
            return complete_files(
                self._tables,
                staged.plain,
                [entry for entries, _ in contributions for entry in entries],
                step=save.step,
                world_size=self._coordinator.world_size,
                time=save.time,
                score=save.score,
                finite=None if self._checked is None else all(finite for _, (_, finite) in contributions),
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
