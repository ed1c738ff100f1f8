"""The two phases in which all ranks make a checkpoint together: all write, then it gets its name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from hpctrain.checkpoint.agreement import Agreement, LostTouch
from hpctrain.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest
from hpctrain.checkpoint.parts import Part, Writing, write_together
from hpctrain.checkpoint.place import Place, hidden_name, new_token, this_machine
from hpctrain.errors import CheckpointError

Remark = TypeVar("Remark")


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
        CheckpointError: on all ranks alike. Nothing was committed, and what was there is untouched.
    """
    agreement, place = site.agreement, site.place
    failure = f"checkpoint of step {step} was not written to {place.folder}"
    token, machine, alike = agreement.from_main((new_token(), this_machine(), (step, own.alike)), failure)
    name = hidden_name(step, site.machine or machine, token)
    with ExitStack() as cleanup:

        def begin() -> None:
            if alike != (step, own.alike):
                raise CheckpointError(
                    f"this rank saves step {step}, rank 0 step {alike[0]}"
                    if alike[0] != step
                    else "names, types or shapes of this rank's tensors are not those of rank 0"
                )
            if site.leads:
                cleanup.enter_context(place.opened(name))

        agreement.together(begin, failure)
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

        def commit() -> Manifest | None:
            if not site.leads:
                return None
            if site.private:  # it may hold a part of what an earlier attempt wrote after this step
                place.withdraw(step)
            if not place.commit(place.folder / name, step, files) and site.private:
                raise CheckpointError(f"{place.folder} has another checkpoint of this step")
            return Manifest.decode(files[MANIFEST_NAME], place.folder / name)

        try:
            manifest = agreement.together(commit, failure)
        except LostTouch:
            raise
        except CheckpointError:
            if site.private and site.leads:
                place.withdraw(step)  # some nodes have theirs, others do not
            raise
    return agreement.from_main(manifest, failure)  # type: ignore[return-value]
