"""Commit a checkpoint in two phases: all ranks write, then the folder is renamed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, STATE_NAME, FileEntry, Manifest, make_entry
from hpctrain.checkpoint.io.background_io import FileWrite, FileWriter, IoThread, wait_on_all_ranks
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir, boot_identity, new_save_token, temporary_name
from hpctrain.checkpoint.io.coordination import PeerLost, RankCoordinator, SaveAborted
from hpctrain.errors import CheckpointError

RemarkT = TypeVar("RemarkT")
T = TypeVar("T")

#: Limit on the wait for the cleanup after a save, in seconds; the cleanup always runs.
_CLEANUP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class CommitTarget:
    coordinator: RankCoordinator
    directory: CheckpointDir
    is_leader: bool
    """True if this rank leads: one rank per folder creates and renames subfolders."""
    node_local: bool = False
    """True if the ranks do not all see the same folder."""
    machine: str | None = None
    """`boot_identity()` of the leading rank; None means rank 0."""
    io_timeout_s: float = 300.0
    """Maximum time without disk progress, in seconds."""
    io_thread: IoThread = field(default_factory=IoThread)

    def run_on_leaders(self, work: Callable[[], T], failure: str, abort: threading.Event) -> T | None:
        """Collective. Run `work` on the leading ranks; return None on others, and raise errors on all."""
        task = self.io_thread.submit(work) if self.is_leader else None
        wait_on_all_ranks(self.coordinator, task, abort, timeout_s=self.io_timeout_s, failure=failure)
        self.coordinator.raise_on_all(task.error if task else None, failure)
        return task.result if task else None

    def clean_up(self, work: Callable[[], object]) -> None:
        self.io_thread.submit(work).wait(min(self.io_timeout_s, _CLEANUP_TIMEOUT_S))


@dataclass
class RankWrite(Generic[RemarkT]):
    files: Sequence[FileWrite]
    finalize: Callable[[list[FileEntry], list[RemarkT]], Mapping[str, bytes]]
    """Function for rank 0: returns all other files, including the manifest, from all entries and remarks."""
    remark: Callable[[], RemarkT]
    """Called when the files are written; sent to rank 0. See `messages.gather` for the types."""
    fingerprint: Any = None
    """Must be equal on all ranks."""
    ready: Any = None
    """Object to `synchronize()` with before the parts are read, or None."""
    abort: threading.Event = field(default_factory=threading.Event)
    """If set on any rank, all ranks abort."""
    writer: FileWriter | None = None
    """Set by `write_and_commit`. If the disk hangs, this may still run after the return."""


def write_and_commit(target: CommitTarget, step: int, write: RankWrite[Any]) -> Manifest:
    """Collective. Write a checkpoint and commit it.

    Saves cannot mix. Each save has a new folder name, which rank 0 sends with the step. Every rank compares
    this step with its own step. Each rank has only one save in flight.

    Raises:
        CheckpointError: on all ranks. Nothing was committed, and existing checkpoints are unchanged. If the
            disk hangs in the final call, a valid checkpoint may still appear.
    """
    coordinator, directory = target.coordinator, target.directory
    failure = f"the checkpoint of step {step} was not written to {directory.folder}"
    token, machine, alike = coordinator.broadcast(
        (new_save_token(), boot_identity(), (step, write.fingerprint)), failure
    )
    name = temporary_name(step, target.machine or machine, token)
    coordinator.raise_on_all(_difference(alike, (step, write.fingerprint)), failure)
    hold = ExitStack()
    try:
        target.run_on_leaders(
            lambda: hold.enter_context(directory.temporary_folder(name)), failure, write.abort
        )
        write.writer = FileWriter(
            directory.folder / name, write.files, durable=directory.durable, ready=write.ready
        )
        entries = _write_files(target, write.writer, write.abort, failure)
        brought = coordinator.all_gather(
            ([astuple(entry) for entry in entries], write.remark()), failure, to=0
        )

        def seal() -> Mapping[str, bytes]:
            if not coordinator.is_main:
                return {}
            entries = [FileEntry(*entry) for entries, _ in brought for entry in entries]
            return write.finalize(entries, [remark for _, remark in brought])

        files = coordinator.run_on_all(seal, failure)
        if target.node_local:
            files = coordinator.broadcast(dict(files), failure)

        def commit() -> Manifest:
            if target.node_local:  # the folder may contain parts of this step from an earlier attempt
                directory.discard(step)
            if not directory.commit(directory.folder / name, step, files) and target.node_local:
                raise CheckpointError(
                    f"{directory.folder} already contains a different checkpoint of this step"
                )
            return Manifest.decode(files[MANIFEST_NAME], directory.folder / name)

        try:
            manifest = target.run_on_leaders(commit, failure, write.abort)
        except PeerLost:
            raise
        except CheckpointError:
            # Some nodes may have committed their part, but others have not.
            if target.node_local and target.is_leader:
                target.clean_up(lambda: directory.discard(step))
            raise
    finally:
        if target.is_leader:
            target.clean_up(hold.close)
    return shared_manifest(coordinator, manifest, directory.folder, failure)


def _write_files(
    target: CommitTarget, writer: FileWriter, abort: threading.Event, failure: str
) -> list[FileEntry]:
    """Write the files of all ranks; afterwards, no rank is writing, unless its disk hangs."""
    writer.start("hpctrain-checkpoint-writing")
    try:
        given_up = wait_on_all_ranks(
            target.coordinator, writer, abort, timeout_s=target.io_timeout_s, failure=failure
        )
    finally:
        # The writer has already ended, unless a rank was lost or the disk hangs.
        writer.stop.set()
    target.coordinator.raise_on_all(writer.error, failure)
    if given_up:
        raise SaveAborted(f"{failure}: the save was aborted.")
    assert writer.result is not None
    return writer.result


def complete_files(
    tables: Mapping[str, bytes], plain: Any, entries: Iterable[FileEntry], **fields: Any
) -> dict[str, bytes]:
    files = {**tables, STATE_NAME: json.dumps(plain).encode("ascii") + b"\n"}
    small = (make_entry(name, content) for name, content in files.items())
    return {**files, MANIFEST_NAME: Manifest(files=(*entries, *small), **fields).encode()}


def shared_manifest(
    coordinator: RankCoordinator, manifest: Manifest | None, path: Path, waiting_for: str
) -> Manifest:
    """Collective."""
    content = coordinator.broadcast(None if manifest is None else manifest.encode(), waiting_for)
    assert content is not None
    return Manifest.decode(content, path)


def _difference(of_main: tuple[int, Any], of_rank: tuple[int, Any]) -> str | None:
    if of_main == of_rank:
        return None
    if of_main[0] != of_rank[0]:
        return f"this rank is saving step {of_rank[0]}, but rank 0 is saving step {of_main[0]}"
    return "the names, types or shapes of this rank's tensors differ from those of rank 0"
