"""A second, faster folder: checkpoints are written there first, and copied to the shared one behind.

Each node has a folder of its own, with the files of its own ranks and a copy of the manifest of all. A
checkpoint in it counts where the parts on the nodes that are there *now* make up the whole. Where every rank
sees all parts, it is loaded from there; otherwise the parts are first brought together in the shared folder,
which is what the copying would have done.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from hpctrain.checkpoint.agreement import Agreement, reason
from hpctrain.checkpoint.commit import Site
from hpctrain.checkpoint.copying import Copying, NotCopied
from hpctrain.checkpoint.loading import Whole
from hpctrain.checkpoint.manifest import MANIFEST_NAME, Manifest
from hpctrain.checkpoint.node_parts import LARGE_SUFFIX, Holding, find_whole, holdings
from hpctrain.checkpoint.place import Place, this_machine
from hpctrain.errors import CheckpointError
from hpctrain.rundir import step_name, steps_in


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
        self._shared = shared.place
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
        self._copying = Copying(self.site, shared, agreement, on_copied=on_copied, on_failure=on_failure)

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
            if not base.is_dir():
                raise FileNotFoundError(errno.ENOENT, "there is no such folder on this node", str(base))
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
        if lost := self._copying.lost:
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
        begin = self.site.agreement.is_main and self._copying.request(step, may_skip=may_skip)
        if self.site.agreement.from_main(begin, f"step {step} in the second tier"):
            self._copying.start(step)
        self._drop_superseded(keep_newest=True)

    def close(self, deadline: float | None, *, clean: bool) -> list[str]:
        """Wait for the copying, and where the run is over clean the tier. All ranks must call this.

        Args:
            deadline: by the monotonic clock; what has not been copied then stays in the tier.
            clean: remove the run's folder, if its newest step has reached the shared folder.

        Returns:
            Sentences about what did not go as it should.
        """
        self._copying.finish(deadline)
        if not clean:
            return []
        place, shared = self.site.place, self._shared.folder
        try:
            newest, in_shared = (max(steps_in(folder), default=-1) for folder in (place.folder, shared))
        except OSError as error:
            return [f"{place.folder} was not removed, for it is not known what was copied: {reason(error)}."]
        if newest > in_shared:
            return [f"Step {newest} lies in {place.folder} only; it could not be copied to {shared}."]
        if self.site.leads:
            shutil.rmtree(place.folder, ignore_errors=True)
        return []

    def holdings(self) -> dict[int, list[Holding | None]]:
        """See the function of this name. All ranks must call this."""
        return holdings(self.site)

    def find(self, step: int, held: list[Holding | None]) -> Whole:
        """The checkpoint of a step, if the parts that are there make up a whole. All ranks must call this.

        Raises:
            BrokenCheckpoint: on all ranks alike: a part is missing or changed.
            CheckpointError: on all ranks alike: whether it is whole cannot be told now.
        """
        found = find_whole(self.site, step, held)
        if found.all_see_all:
            return Whole(self.site.place.folder / step_name(step), found.manifest)
        large = [entry.name for entry in found.own if entry.name.endswith(LARGE_SUFFIX)]
        self._copying.copy(step, large, found.small)
        return Whole(self._shared.folder / step_name(step), found.manifest)

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
        path, agreement = self._shared.folder / step_name(step) / MANIFEST_NAME, self.site.agreement
        return agreement.from_main(agreement.is_main and os.path.isfile(path), f"looking for {path}")

    def _drop_superseded(self, *, keep_newest: bool) -> None:
        """Delete what is not still to be copied, but for the newest. All ranks must call this."""
        needed = self.site.agreement.from_main(self._copying.needed, "clearing the second tier")
        if not self.site.leads:
            return
        with suppress(OSError):  # what stays is in the way of room alone
            for step in self.site.place.steps()[: -1 if keep_newest else None]:
                if step not in needed:
                    self.site.place.withdraw(step)
