"""Two-phase commit of a checkpoint by all ranks: all write, then it is renamed to its final name."""

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

LayoutT = TypeVar("LayoutT")
T = TypeVar("T")

#: Limit on the wait for the cleanup after a save, in seconds; the cleanup itself always runs.
_CLEARING_S = 30.0


@dataclass(frozen=True)
class CommitTarget:
    """A folder in which the ranks save together, from the view of one rank."""

    agreement: RankCoordinator
    place: CheckpointDir
    leads: bool
    """True if this rank creates and renames folders; there is one such rank per folder."""
    private: bool = False
    """True if not all ranks see the same folder."""
    machine: str | None = None
    """`boot_identity()` of the rank that leads here; None means that of rank 0."""
    patience_s: float = 300.0
    """Longest time without disk progress, in seconds."""
    hand: IoThread = field(default_factory=IoThread)
    """Queue of this rank's operations in the folder."""

    def together(self, work: Callable[[], T], failure: str, give_up: threading.Event) -> T | None:
        """Run `work` on the ranks that lead and wait for it on all; return None on the other ranks.

        Args:
            work: the operation. If a disk hangs, it may still complete after this has raised.
            failure: description of a failure, as the start of a sentence.
            give_up: when set on any rank, all ranks limit their wait for a hanging disk to a few seconds.

        Raises:
            CheckpointError: on all ranks.
        """
        errand = self.hand.do(work) if self.leads else None
        wait_on_all_ranks(self.agreement, errand, give_up, patience_s=self.patience_s, failure=failure)
        self.agreement.raise_alike(errand.problem if errand else None, failure)
        return errand.result if errand else None

    def clear(self, work: Callable[[], object]) -> None:
        """Run a cleanup on this rank; wait for it only briefly if the disk hangs."""
        self.hand.do(work).wait(min(self.patience_s, _CLEARING_S))


@dataclass
class RankWrite(Generic[LayoutT]):
    """The contribution of one rank to a checkpoint."""

    parts: Sequence[FileWrite]
    seal: Callable[[list[tuple[list[FileEntry], LayoutT]]], Mapping[str, bytes]]
    """Function for rank 0: returns all other files, including the manifest, from all entries and remarks."""
    remark: LayoutT
    """Sent to rank 0. See `hpctrain.messages.gather` for the permitted types."""
    alike: Any = None
    """Must be equal on all ranks."""
    ready: Any = None
    """Object to `synchronize()` with before the parts are read, or None."""
    give_up: threading.Event = field(default_factory=threading.Event)
    """Makes all ranks give up when set on any of them."""
    writing: FileWriter | None = None
    """Set by `write_and_commit`. If the disk hangs, it may still be running after that has returned."""


def write_and_commit(site: CommitTarget, step: int, own: RankWrite[Any]) -> Manifest:
    """Write a checkpoint and commit it. All ranks must call this.

    Two saves cannot mix. Each save has a new folder name, which rank 0 sends together with the step; every
    rank compares that step with its own. Each rank has only one save in flight.

    Raises:
        CheckpointError: on all ranks. Nothing was committed, and existing checkpoints are unchanged. If the
            disk hangs in the final call, a valid checkpoint may still appear.
    """
    agreement, place = site.agreement, site.place
    failure = f"checkpoint of step {step} was not written to {place.folder}"
    token, machine, alike = agreement.from_main(
        (new_save_token(), boot_identity(), (step, own.alike)), failure
    )
    name = temporary_name(step, site.machine or machine, token)
    agreement.raise_alike(_difference(alike, (step, own.alike)), failure)
    hold = ExitStack()
    try:
        site.together(lambda: hold.enter_context(place.opened(name)), failure, own.give_up)
        own.writing = FileWriter(place.folder / name, own.parts, durable=place.durable, ready=own.ready)
        entries = write_on_all_ranks(
            agreement, own.writing, own.give_up, patience_s=site.patience_s, failure=failure
        )
        brought = agreement.on_main(([astuple(entry) for entry in entries], own.remark), failure)

        def seal() -> Mapping[str, bytes]:
            if not agreement.is_main:
                return {}
            return own.seal(
                [([FileEntry(*entry) for entry in entries], remark) for entries, remark in brought]
            )

        files = agreement.together(seal, failure)
        if site.private:
            files = agreement.from_main(dict(files), failure)

        def commit() -> Manifest:
            if site.private:  # it may contain parts that an earlier attempt wrote for this step
                place.withdraw(step)
            if not place.commit(place.folder / name, step, files) and site.private:
                raise CheckpointError(f"{place.folder} already has another checkpoint of this step")
            return Manifest.decode(files[MANIFEST_NAME], place.folder / name)

        try:
            manifest = site.together(commit, failure, own.give_up)
        except PeerLost:
            raise
        except CheckpointError:
            if site.private and site.leads:  # some nodes have committed their part, others have not
                site.clear(lambda: place.withdraw(step))
            raise
    finally:
        if site.leads:
            site.clear(hold.close)
    return shared_manifest(agreement, manifest, place.folder, failure)


def shared_manifest(
    agreement: RankCoordinator, own: Manifest | None, path: Path, waiting_for: str
) -> Manifest:
    """Return rank 0's manifest of the checkpoint at `path`. All ranks must call this."""
    content = agreement.from_main(None if own is None else own.encode(), waiting_for)
    assert content is not None
    return Manifest.decode(content, path)


def _difference(of_main: tuple[int, Any], own: tuple[int, Any]) -> str | None:
    """Return a description of the difference between this rank's save and that of rank 0."""
    if of_main == own:
        return None
    if of_main[0] != own[0]:
        return f"this rank saves step {own[0]}, but rank 0 saves step {of_main[0]}"
    return "names, types or shapes of this rank's tensors differ from those of rank 0"
