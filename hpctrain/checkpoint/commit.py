"""The two phases in which all ranks make a checkpoint together: all write, then it gets its name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hpctrain.checkpoint.agreement import Agreement, LostTouch
from hpctrain.checkpoint.errands import Hand, wait_for_all
from hpctrain.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from hpctrain.checkpoint.parts import Part, Writing, write_together
from hpctrain.checkpoint.place import Place, hidden_name, new_token, this_machine
from hpctrain.errors import CheckpointError

Remark = TypeVar("Remark")
T = TypeVar("T")

#: How long is waited for what a save leaves to be cleared away, which is done in any case, if only later.
_CLEARING_S = 30.0


@dataclass(frozen=True)
class Site:
    """A place in which ranks save together, seen from one of them."""

    agreement: Agreement
    place: Place
    leads: bool
    """Whether this rank makes and renames folders: one does for every folder there is."""
    private: bool = False
    """Whether the ranks do not all see the same folder."""
    machine: str | None = None
    """`this_machine()` of the rank that leads here; None is that of rank 0."""
    patience_s: float = 300.0
    """How long the disk may take nothing, in seconds."""
    hand: Hand = field(default_factory=Hand)
    """Does what this rank has to do in the folder."""

    def together(self, work: Callable[[], T], failure: str, give_up: threading.Event) -> T | None:
        """Have the ranks that lead do `work` in their folders, and wait for it; the others bring None.

        Args:
            work: what to do. Where a disk hangs, it may still be done when this has raised.
            failure: what it means where it fails, as the beginning of a sentence.
            give_up: when set on any rank, no rank waits much longer for a disk that hangs.

        Raises:
            CheckpointError: on all ranks alike.
        """
        errand = self.hand.do(work) if self.leads else None
        wait_for_all(self.agreement, errand, give_up, patience_s=self.patience_s, failure=failure)
        self.agreement.raise_alike(errand.problem if errand else None, failure)
        return errand.result if errand else None

    def clear(self, work: Callable[[], object]) -> None:
        """Have done what clears away, on this rank; it is not waited for long where the disk hangs."""
        self.hand.do(work).wait(min(self.patience_s, _CLEARING_S))


@dataclass
class Contribution(Generic[Remark]):
    """What one rank brings to a checkpoint."""

    parts: Sequence[Part]
    seal: Callable[[list[tuple[list[FileEntry], Remark]]], Mapping[str, bytes]]
    """On rank 0: from what every rank wrote and remarked, the content of all other files, the manifest among
    them."""
    remark: Remark
    """Goes to rank 0."""
    alike: Any = None
    """Has to be equal on all ranks."""
    ready: Any = None
    """Something to `synchronize()` with before the parts are read, or None."""
    give_up: threading.Event = field(default_factory=threading.Event)
    """Asks all ranks to give up, when set on any."""
    writing: Writing | None = None
    """Set by `commit_together`. Where the disk hangs, it has not ended even when that has returned."""


def commit_together(site: Site, step: int, own: Contribution[Any]) -> Manifest:
    """Write a checkpoint and commit it. All ranks must call this.

    Two saves cannot mix: the folder's name is new in every save and comes from rank 0 together with the step,
    which every rank compares with its own; and each rank has one save in flight.

    Raises:
        CheckpointError: on all ranks alike. Nothing was committed, and what was there is untouched; where the
            disk hangs in the last call of all, a whole checkpoint may yet come of it.
    """
    agreement, place = site.agreement, site.place
    failure = f"checkpoint of step {step} was not written to {place.folder}"
    token, machine, alike = agreement.from_main((new_token(), this_machine(), (step, own.alike)), failure)
    name = hidden_name(step, site.machine or machine, token)
    agreement.raise_alike(_difference(alike, (step, own.alike)), failure)
    hold = ExitStack()
    try:
        site.together(lambda: hold.enter_context(place.opened(name)), failure, own.give_up)
        own.writing = Writing(place.folder / name, own.parts, durable=place.durable, ready=own.ready)
        entries = write_together(
            agreement, own.writing, own.give_up, patience_s=site.patience_s, failure=failure
        )
        everything = agreement.on_main((entries, own.remark), failure)

        def seal() -> Mapping[str, bytes]:
            return own.seal(everything) if agreement.is_main else {}

        files = agreement.together(seal, failure)
        if site.private:
            files = agreement.from_main(files, failure)

        def commit() -> Manifest:
            if site.private:  # it may hold a part of what an earlier attempt wrote after this step
                place.withdraw(step)
            if not place.commit(place.folder / name, step, files) and site.private:
                raise CheckpointError(f"{place.folder} has another checkpoint of this step")
            return Manifest.decode(files[MANIFEST_NAME], place.folder / name)

        try:
            manifest = site.together(commit, failure, own.give_up)
        except LostTouch:
            raise
        except CheckpointError:
            if site.private and site.leads:  # some nodes have theirs, others do not
                site.clear(lambda: place.withdraw(step))
            raise
    finally:
        if site.leads:
            site.clear(hold.close)
    return agreement.from_main(manifest, failure)  # type: ignore[return-value]


def _difference(of_main: tuple[int, Any], own: tuple[int, Any]) -> str | None:
    """What of this rank's save is another than of rank 0's."""
    if of_main == own:
        return None
    if of_main[0] != own[0]:
        return f"this rank saves step {own[0]}, rank 0 step {of_main[0]}"
    return "names, types or shapes of this rank's tensors are not those of rank 0"
