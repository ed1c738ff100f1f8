"""Two-phase commit of a checkpoint by all ranks: all ranks write, then the folder is renamed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest
from hpctrain.checkpoint.io.background_io import IoThread, wait_on_all_ranks
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir, boot_identity, new_save_token, temporary_name
from hpctrain.checkpoint.io.coordination import PeerLost, RankCoordinator
from hpctrain.checkpoint.io.file_writer import FileWrite, FileWriter, write_on_all_ranks
from hpctrain.errors import CheckpointError

RemarkT = TypeVar("RemarkT")
T = TypeVar("T")

#: Limit on the wait for the cleanup after a save, in seconds; the cleanup always runs.
_CLEANUP_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class CommitTarget:
    """A folder in which the ranks save together, as seen by one rank."""

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
    """Queue of operations of this rank in the folder."""

    def run_on_leaders(self, work: Callable[[], T], failure: str, abort: threading.Event) -> T | None:
        """Run `work` on the leading ranks, and wait on all ranks; return None on other ranks.

        Args:
            work: the operation. If a disk hangs, the operation may complete after an exception.
            failure: description of a failure, as the start of a sentence.
            abort: if set on any rank, all ranks limit the wait for a hanging disk to a few seconds.

        Raises:
            CheckpointError: on all ranks.
        """
        task = self.io_thread.submit(work) if self.is_leader else None
        wait_on_all_ranks(self.coordinator, task, abort, timeout_s=self.io_timeout_s, failure=failure)
        self.coordinator.raise_on_all(task.error if task else None, failure)
        return task.result if task else None

    def clean_up(self, work: Callable[[], object]) -> None:
        """Run a cleanup on this rank, with a short wait if the disk hangs."""
        self.io_thread.submit(work).wait(min(self.io_timeout_s, _CLEANUP_TIMEOUT_S))


@dataclass
class RankWrite(Generic[RemarkT]):
    """Contribution of a rank to a checkpoint."""

    files: Sequence[FileWrite]
    finalize: Callable[[list[tuple[list[FileEntry], RemarkT]]], Mapping[str, bytes]]
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


def write_and_commit(target: CommitTarget, step: int, own: RankWrite[Any]) -> Manifest:
    """Write a checkpoint and commit it. All ranks must call this.

    Saves cannot mix. Each save has a new folder name, which rank 0 sends with the step. Every rank compares
    this step with its own step. Each rank has only one save in flight.

    Raises:
        CheckpointError: on all ranks. Nothing was committed, and existing checkpoints are unchanged. If the
            disk hangs in the final call, a valid checkpoint may still appear.
    """
    coordinator, directory = target.coordinator, target.directory
    failure = f"the checkpoint of step {step} was not written to {directory.folder}"
    token, machine, alike = coordinator.broadcast(
        (new_save_token(), boot_identity(), (step, own.fingerprint)), failure
    )
    name = temporary_name(step, target.machine or machine, token)
    coordinator.raise_on_all(_difference(alike, (step, own.fingerprint)), failure)
    hold = ExitStack()
    try:
        target.run_on_leaders(
            lambda: hold.enter_context(directory.temporary_folder(name)), failure, own.abort
        )
        own.writer = FileWriter(
            directory.folder / name, own.files, durable=directory.durable, ready=own.ready
        )
        entries = write_on_all_ranks(
            coordinator, own.writer, own.abort, timeout_s=target.io_timeout_s, failure=failure
        )
        brought = coordinator.gather(([astuple(entry) for entry in entries], own.remark()), failure)

        def seal() -> Mapping[str, bytes]:
            if not coordinator.is_main:
                return {}
            return own.finalize(
                [([FileEntry(*entry) for entry in entries], remark) for entries, remark in brought]
            )

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
            manifest = target.run_on_leaders(commit, failure, own.abort)
        except PeerLost:
            raise
        except CheckpointError:
            if (
                target.node_local and target.is_leader
            ):  # some nodes have committed their part, but others have not
                target.clean_up(lambda: directory.discard(step))
            raise
    finally:
        if target.is_leader:
            target.clean_up(hold.close)
    return shared_manifest(coordinator, manifest, directory.folder, failure)


def shared_manifest(
    coordinator: RankCoordinator, own: Manifest | None, path: Path, waiting_for: str
) -> Manifest:
    """Return rank 0's manifest of the checkpoint at `path`. All ranks must call this."""
    content = coordinator.broadcast(None if own is None else own.encode(), waiting_for)
    assert content is not None
    return Manifest.decode(content, path)


def _difference(of_main: tuple[int, Any], own: tuple[int, Any]) -> str | None:
    """Describe the difference between the saves of this rank and rank 0."""
    if of_main == own:
        return None
    if of_main[0] != own[0]:
        return f"this rank is saving step {own[0]}, but rank 0 is saving step {of_main[0]}"
    return "the names, types or shapes of this rank's tensors differ from those of rank 0"
