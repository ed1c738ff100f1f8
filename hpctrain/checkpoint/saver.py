"""Background execution of saves: the target tier, the commit, and the report of each outcome."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from hpctrain.checkpoint.format.dcp_format import StoredChunk, build_tables, rank_file_name, stored_chunks
from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest, make_entry
from hpctrain.checkpoint.format.staged_file import StagedFile
from hpctrain.checkpoint.format.write_plan import WriteItem
from hpctrain.checkpoint.io.commit import CommitTarget, RankWrite, write_and_commit
from hpctrain.checkpoint.io.coordination import PeerLost, describe_exception
from hpctrain.checkpoint.io.file_writer import FileWriter, SaveAborted, write_of_bytes
from hpctrain.checkpoint.io.loading import STATE_NAME
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.save_types import CommittedSave, PendingSave, describe_save
from hpctrain.checkpoint.staging import StagedState
from hpctrain.checkpoint.tier.local_tier import LocalTier
from hpctrain.checkpoint.tier.tier_copier import TierCopyFailed
from hpctrain.errors import CheckpointError


class MetadataCache:
    """The tables of a checkpoint, rebuilt only if a layout has changed.

    For each save: `news` on every rank, `tables` on rank 0 with all news, and `arrived` once the save has
    succeeded.
    """

    def __init__(self) -> None:
        self._told: tuple[WriteItem, ...] | None = None
        self._of_ranks: dict[int, list[StoredChunk]] = {}
        self._tables: dict[str, bytes] = {}

    def news(self, image: StagedFile, rank: int) -> list[StoredChunk] | None:
        """Return the layout of this rank's file for rank 0; None if rank 0 already has it."""
        is_known = self._told == image.pieces
        # If the save fails, rank 0 may or may not have received it.
        self._told = None
        return None if is_known else stored_chunks(image, rank)

    def arrived(self, image: StagedFile) -> None:
        """Record that rank 0 has received the layout of this rank's file."""
        self._told = image.pieces

    def tables(self, news: Sequence[list[StoredChunk] | None]) -> dict[str, bytes]:
        """Return the tables, by file name.

        Args:
            news: the result of `news` of each rank, by rank.
        """
        changed = {rank: layout for rank, layout in enumerate(news) if layout is not None}
        if changed:
            self._of_ranks.update(changed)
            self._tables = build_tables(
                item for rank in sorted(self._of_ranks) for item in self._of_ranks[rank]
            )
        return self._tables


#: The file entries of one rank, and its layout if it changed.
_Brought = tuple[list[FileEntry], list[tuple[Any, ...]] | None]


class Saver:
    """Writer of one save at a time, in threads of the store.

    Attributes:
        tier: the local tier, if any; set it before the first save.
        notes: sentences to report with the next checkpoint.
    """

    def __init__(self, site: CommitTarget, retention: Retention) -> None:
        self._site, self._retention, self._agreement = site, retention, site.agreement
        self.tier: LocalTier | None = None
        self.notes: list[str] = []
        self._layouts = MetadataCache()
        self._writing: FileWriter | None = None
        self._ended: list[CommittedSave | CheckpointError] = []
        self._lock = threading.Lock()

    @property
    def hanging(self) -> FileWriter | None:
        """The writer that still reads the memory of an earlier save because its disk hangs; usually None."""
        return None if self._writing is None or self._writing.ended.is_set() else self._writing

    def run(self, save: PendingSave) -> None:
        """Write and commit `save`; store its outcome and report it in `ended`. All ranks must call this."""
        try:
            save.outcome = self._save(save)
        except CheckpointError as error:
            save.outcome = error
        except Exception as error:  # noqa: BLE001 (it is the outcome)
            save.outcome = CheckpointError(
                f"checkpoint of step {save.step} was not written: {describe_exception(error)}"
            )
        save.captured = None
        self._tell(save.outcome)

    def ended(self) -> list[CommittedSave | CheckpointError]:
        """Return the outcomes of saves and copies since the last call. Never waits."""
        with self._lock:
            ended, self._ended = self._ended, []
        return ended

    def forget(self, outcome: CommittedSave | CheckpointError | None) -> None:
        """Remove `outcome` from the reports, since the caller already has it."""
        with self._lock:
            self._ended = [each for each in self._ended if each is not outcome]

    def reached_shared(self, manifest: Manifest, begun: float) -> None:
        """Report a checkpoint that was copied from the local tier."""
        self._tell(describe_save(self._site.place, manifest, begun, self._prune(manifest.step)))

    def failed_to_reach_shared(self, error: TierCopyFailed) -> None:
        """Report a checkpoint that could not be copied."""
        self._tell(error)

    def _tell(self, outcome: CommittedSave | CheckpointError) -> None:
        with self._lock:
            self._ended.append(outcome)

    def _save(self, save: PendingSave) -> CommittedSave:
        self._agreement.raise_alike(save.problem, f"checkpoint of step {save.step} was not written")
        assert save.captured is not None
        notes, self.notes = self.notes, []
        if self.tier is not None and not save.direct:
            try:
                self.tier.make_room(save.captured.image.num_bytes)
                manifest = self._commit(save, save.captured, self.tier.site)
            except (PeerLost, SaveAborted):
                raise
            except CheckpointError as error:
                notes.append(f"{error}; writing directly to {self._site.place.folder}.")
            else:
                self.tier.committed(save.step, may_skip=self._retention.may_skip(save.step, save.score))
                return describe_save(self.tier.site.place, manifest, save.begun, notes)
        manifest = self._commit(save, save.captured, self._site)
        notes += self._prune(save.step)
        return describe_save(self._site.place, manifest, save.begun, notes)

    def _commit(self, save: PendingSave, captured: StagedState, site: CommitTarget) -> Manifest:
        image, rank = captured.image, self._agreement.rank

        def seal(everything: list[_Brought]) -> dict[str, bytes]:
            tables = self._layouts.tables(
                [None if news is None else [StoredChunk(*item) for item in news] for _, news in everything]
            )
            files = {**tables, STATE_NAME: json.dumps(captured.plain).encode("ascii") + b"\n"}
            entries = [entry for entries, _ in everything for entry in entries]
            entries += [make_entry(name, content) for name, content in files.items()]
            size = self._agreement.world_size
            manifest = Manifest(save.step, size, save.time, save.score, tuple(entries))
            return {**files, MANIFEST_NAME: manifest.encode()}

        own = RankWrite(
            [write_of_bytes(rank_file_name(rank), image.content)] if image.num_bytes else [],
            seal,
            remark=None if (news := self._layouts.news(image, rank)) is None else [*map(astuple, news)],
            alike=captured.alike,
            ready=captured.ready,
            give_up=save.give_up,
        )
        try:
            manifest = write_and_commit(site, save.step, own)
        finally:
            # Drop a finished writer, so that its memory can be freed when a larger state replaces it.
            self._writing = None if own.writing is None or own.writing.ended.is_set() else own.writing
        self._layouts.arrived(image)
        return manifest

    def _prune(self, newest: int) -> list[str]:
        if not self._agreement.is_main:
            return []
        pruning = self._site.hand.do(lambda: self._site.place.prune(newest, self._retention))
        pruning.wait(self._site.patience_s)
        if pruning.problem:  # the new checkpoint is committed anyway
            return [f"No old checkpoint was deleted: {pruning.problem}."]
        return pruning.result or []
