"""A second, faster folder: checkpoints are written there first, and copied to the shared one behind.

Each node has a folder of its own, with the files of its own ranks and a copy of the manifest of all. A
checkpoint in it counts where the parts on the nodes that are there *now* make up the whole. Where every rank
sees all parts, it is loaded from there; otherwise the parts are first brought together in the shared folder,
which is what the copying would have done.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from hpctrain.checkpoint.agreement import Agreement, LostTouch, reason
from hpctrain.checkpoint.commit import Contribution, Site, commit_together
from hpctrain.checkpoint.loading import Whole, check_files, judged
from hpctrain.checkpoint.manifest import MANIFEST_NAME, FileEntry, Manifest, entry_of
from hpctrain.checkpoint.parts import of_file
from hpctrain.checkpoint.place import Place, this_machine
from hpctrain.errors import BrokenCheckpoint, CheckpointError
from hpctrain.rundir import step_name, steps_in

_LARGE_SUFFIX = ".distcp"


class NotCopied(CheckpointError):
    """A checkpoint lies in the second tier only: it could not be copied."""


@dataclass(frozen=True)
class _Holding:
    """What a rank sees of one step in its node's folder."""

    manifest: str
    """Checksum of the manifest."""
    names: frozenset[str]
    """Files of the size that the manifest says."""


class Tier:
    """The second tier of one run, seen from one rank.

    Attributes:
        site: where ranks save in it.
    """

    def __init__(
        self,
        folder: Path,
        shared: Site,
        agreement: Agreement,
        *,
        members: list[int],
        machine: str,
        limit_bytes: int | None,
        on_copied: Callable[[Manifest, float], None],
        on_failure: Callable[[NotCopied], None],
    ) -> None:
        """See `open`, which finds out `members`, the ranks that see the same folder, and `machine`."""
        self._shared = replace(shared, agreement=agreement)
        self._on_copied, self._on_failure = on_copied, on_failure
        self._limit_bytes, self._num_members = limit_bytes, len(members)
        leads = agreement.rank == min(members)
        place = Place(folder, durable=False)
        self.site = Site(
            shared.agreement,
            place,
            leads=leads,
            private=True,
            machine=machine,
            patience_s=shared.patience_s,
        )
        self._lock = threading.Lock()
        self._pending: list[tuple[int, bool]] = []
        self._copying: threading.Thread | None = None
        self._is_copying = False
        self._in_use: set[int] = set()
        self._reached = -1
        self._give_up = threading.Event()

    @classmethod
    def open(
        cls,
        base: Path,
        shared: Site,
        agreement: Agreement,
        *,
        limit_bytes: int | None,
        on_copied: Callable[[Manifest, float], None],
        on_failure: Callable[[NotCopied], None],
    ) -> tuple[Tier | None, str | None]:
        """Make the run's own folder in `base` on every node. All ranks must call this.

        Args:
            base: the fast folder; the same path on all nodes.
            shared: where checkpoints lie for good.
            agreement: for what goes on beside the saves.
            limit_bytes: how much may lie in the run's folder on a node; half of its file system if None.
            on_copied: called when a checkpoint has reached the shared folder, with the time it was begun.
            on_failure: called when one could not be copied.

        Returns:
            The tier; or None, and why there is none.
        """
        home = shared.place.folder.resolve()
        # Two runs of one name in different folders must not meet.
        folder = base / f"hpctrain-{home.parent.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(home))}"
        token = agreement.from_main(secrets.token_hex(4), f"opening the second tier {base}")
        marker = folder / f".rank-{token}-{agreement.rank}"
        failure = f"the second tier {base} cannot be used"

        def mark() -> None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            marker.touch()

        try:
            agreement.together(mark, failure)
            machines = agreement.all(this_machine(), failure)
            seen = agreement.together(lambda: list(folder.glob(f".rank-{token}-*")), failure)
            agreement.together(marker.unlink, failure)
        except CheckpointError as error:
            return None, f"{error}. Checkpoints go to {shared.place.folder} directly."
        members = [int(path.name.rpartition("-")[2]) for path in seen]
        tier = cls(
            folder,
            shared,
            agreement,
            members=members,
            machine=machines[min(members)],
            limit_bytes=limit_bytes,
            on_copied=on_copied,
            on_failure=on_failure,
        )
        return tier, None

    def make_room(self, num_bytes: int) -> None:
        """See that a save of so many bytes by each rank fits. All ranks must call this.

        Raises:
            CheckpointError: on all ranks alike: it does not.
        """
        self._drop_superseded(keep_newest=True)
        self.site.agreement.together(lambda: self._check_room(num_bytes), "nothing was written")

    def _check_room(self, num_bytes: int) -> None:
        folder = self.site.place.folder
        if lost := self._shared.agreement.lost:
            raise CheckpointError(f"nothing is copied from {folder} any more: {lost}")
        if not self.site.leads:
            return
        disk = shutil.disk_usage(folder)
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        limit = disk.total // 2 if self._limit_bytes is None else self._limit_bytes
        needed = num_bytes * self._num_members
        if used + needed > limit or needed > disk.free:
            raise CheckpointError(
                f"second tier {folder} has no room for {needed} bytes: {used} of {limit} are taken, and "
                f"{disk.free} are free on its disk"
            )

    def committed(self, step: int, *, may_skip: bool) -> None:
        """A step was committed in the tier: have it copied. All ranks must call this, in the background.

        Args:
            step: the step.
            may_skip: where copying is behind, this one need not be copied once there is a newer one.
        """
        begin = False
        if self.site.agreement.is_main:
            with self._lock:
                begin = not self._is_copying
                if begin:
                    self._is_copying, self._in_use = True, {step}
                else:
                    if self._pending and self._pending[-1][1]:
                        self._pending.pop()
                    self._pending.append((step, may_skip))
        if self.site.agreement.from_main(begin, f"step {step} in the second tier"):
            self._begin_copying(step)
        self._drop_superseded(keep_newest=True)

    def close(self, deadline: float | None, *, clean: bool) -> list[str]:
        """Wait for the copying, and where the run is over clean the tier. All ranks must call this.

        Args:
            deadline: by the monotonic clock; what has not been copied then stays in the tier.
            clean: remove the run's folder, if its newest step has reached the shared folder.

        Returns:
            Sentences about what did not go as it should.
        """
        if self._copying is not None:
            self._copying.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if self._copying.is_alive():
                self._give_up.set()
                self._copying.join()
        if not clean:
            return []
        place, shared = self.site.place, self._shared.place.folder
        try:
            newest, in_shared = (max(steps_in(folder), default=-1) for folder in (place.folder, shared))
        except OSError as error:
            return [f"{place.folder} was not removed, for it is not known what was copied: {reason(error)}."]
        if newest > in_shared:
            return [f"Step {newest} lies in {place.folder} only; it could not be copied to {shared}."]
        if self.site.leads:
            shutil.rmtree(place.folder, ignore_errors=True)
        return []

    def holdings(self) -> dict[int, list[_Holding | None]]:
        """What every rank sees in its node's folder, by step. All ranks must call this.

        Raises:
            CheckpointError: on all ranks alike: a rank cannot look through its folder.
        """
        agreement, folder = self.site.agreement, self.site.place.folder
        own = agreement.together(self._own_holdings, f"{folder} cannot be looked through")
        everyone = agreement.all(own, "looking through the second tier")
        steps = {step for held in everyone for step in held}
        return {step: [held.get(step) for held in everyone] for step in steps}

    def _own_holdings(self) -> dict[int, _Holding]:
        own: dict[int, _Holding] = {}
        folder = self.site.place.folder
        for step in steps_in(folder):
            path = folder / step_name(step)
            try:
                content = (path / MANIFEST_NAME).read_bytes()
                files = Manifest.decode(content, path).files
                names = frozenset(
                    entry.name
                    for entry in files
                    if (path / entry.name).is_file() and (path / entry.name).stat().st_size == entry.bytes
                )
            except (OSError, CheckpointError):
                content, names = b"", frozenset()
            own[step] = _Holding(xxhash.xxh3_128_hexdigest(content), names)
        return own

    def find(self, step: int, held: list[_Holding | None]) -> Whole:
        """The checkpoint of a step, if the parts that are there make up a whole. All ranks must call this.

        Raises:
            BrokenCheckpoint: on all ranks alike: a part is missing or changed.
            CheckpointError: on all ranks alike: whether it is whole cannot be told now.
        """
        agreement, path = self.site.agreement, self.site.place.folder / step_name(step)
        # Of two attempts that saved this step, the one that more is there of.
        kinds = [each.manifest for each in held if each is not None]
        kind = max(sorted(set(kinds)), key=kinds.count)
        holders = [rank for rank, each in enumerate(held) if each is not None and each.manifest == kind]
        reads = agreement.rank == holders[0]
        own_small = judged(agreement, lambda: _small_files(path) if reads else None)
        small = next(each for each in agreement.all(own_small, f"reading {path}") if each is not None)
        manifest = Manifest.decode(small.get(MANIFEST_NAME, b""), path)
        shares, loads = {rank: list[FileEntry]() for rank in holders}, dict.fromkeys(holders, 0)
        for entry in manifest.files:
            seeing = [rank for rank in holders if entry.name in _names(held[rank])]
            if not seeing:
                raise BrokenCheckpoint(
                    f"{path} is not whole: {entry.name} is on no node that is here now, or was cut short."
                )
            rank = min(seeing, key=lambda rank: loads[rank])
            shares[rank].append(entry)
            loads[rank] += entry.bytes
        own = shares.get(agreement.rank, [])
        check_files(agreement, path, own, all_see_it=False)
        everything = {entry.name for entry in manifest.files}
        if len(holders) == agreement.world_size and all(_names(each) >= everything for each in held):
            return Whole(path, manifest)
        large = [entry.name for entry in own if entry.name.endswith(_LARGE_SUFFIX)]
        self._copy(step, large, small)
        return Whole(self._shared.place.folder / path.name, manifest)

    def start_from(self, whole: Whole | None) -> None:
        """Drop what cannot be loaded any more; copy what was loaded. All ranks must call this.

        Args:
            whole: the checkpoint from which the run goes on.
        """
        place = self.site.place
        in_tier = whole is not None and whole.folder.parent == place.folder
        step = whole.manifest.step if whole is not None else -1
        self._drop_superseded(keep_newest=in_tier)
        self.site.agreement.all(None, "clearing the second tier")
        if in_tier and not self._is_in_shared(step):
            self.committed(step, may_skip=True)

    def _is_in_shared(self, step: int) -> bool:
        path, agreement = self._shared.place.folder / step_name(step) / MANIFEST_NAME, self.site.agreement
        return agreement.from_main(agreement.is_main and os.path.isfile(path), f"looking for {path}")

    def _begin_copying(self, step: int) -> None:
        if self._copying is not None:
            self._copying.join()  # it has been told to end
        self._copying = threading.Thread(
            target=self._copy_all, args=(step,), name="hpctrain-checkpoint-copying", daemon=True
        )
        self._copying.start()

    def _copy_all(self, first: int) -> None:
        """Copy a step, and those that came meanwhile."""
        step: int | None = first
        while step is not None:
            begun = time.monotonic()
            try:
                manifest = self._copy_own(step)
            except CheckpointError as error:
                self._on_failure(NotCopied(str(error)))
            else:
                self._on_copied(manifest, begun)
            try:
                step = self._shared.agreement.from_main(self._next(), "the next step to copy")
            except LostTouch:
                return  # `make_room` tells of it

    def _copy_own(self, step: int) -> Manifest:
        """Copy what the ranks have written themselves. All ranks must call this."""
        failure = f"step {step} was not copied from {self.site.place.folder}"
        own = self._shared.agreement.together(lambda: self._own_large_files(step), failure)
        return self._copy(step, own, None)

    def _next(self) -> int | None:
        if not self._shared.agreement.is_main:
            return None
        with self._lock:
            if self._pending and not self._give_up.is_set():
                step = self._pending.pop(0)[0]
                self._in_use = {step}
                return step
            self._is_copying, self._in_use = False, set()
            return None

    def _own_large_files(self, step: int) -> list[str]:
        """The large files that this rank has written itself."""
        name = f"__{self._shared.agreement.rank}_0{_LARGE_SUFFIX}"
        return [name] if (self.site.place.folder / step_name(step) / name).exists() else []

    def _copy(self, step: int, large: Iterable[str], small: Mapping[str, bytes] | None) -> Manifest:
        """Bring a step into the shared folder. All ranks must call this.

        Args:
            step: the step.
            large: the files that this rank copies.
            small: the content of the others; None to read them on rank 0.

        Raises:
            CheckpointError: on all ranks alike.
        """
        path = self.site.place.folder / step_name(step)

        def seal(everything: list[tuple[list[FileEntry], None]]) -> Mapping[str, bytes]:
            files = _small_files(path) if small is None else small
            copied = {entry for entries, _ in everything for entry in entries}
            for entry in Manifest.decode(files[MANIFEST_NAME], path).files:
                if entry not in copied and entry_of(entry.name, files.get(entry.name, b"")) != entry:
                    raise BrokenCheckpoint(f"{path} has changed since it was written: {entry.name}.")
            return files

        own = Contribution([of_file(path / name) for name in large], seal, None, give_up=self._give_up)
        return commit_together(self._shared, step, own)

    def _drop_superseded(self, *, keep_newest: bool) -> None:
        """Delete what is not still to be copied, but for the newest. All ranks must call this."""
        with self._lock:
            needed = self._in_use | {step for step, _ in self._pending}
        needed = self.site.agreement.from_main(needed, "clearing the second tier")
        if not self.site.leads:
            return
        with suppress(OSError):  # what stays is in the way of room alone
            for step in self.site.place.steps()[: -1 if keep_newest else None]:
                if step not in needed:
                    self.site.place.withdraw(step)


def _names(holding: _Holding | None) -> frozenset[str]:
    return frozenset() if holding is None else holding.names


def _small_files(path: Path) -> dict[str, bytes]:
    """The content of all files but the large ones."""
    return {
        entry.name: entry.read_bytes() for entry in path.iterdir() if not entry.name.endswith(_LARGE_SUFFIX)
    }
