"""The local tier: a faster folder that receives checkpoints before they are copied to the shared folder.

Each node has a separate folder, with the files of its ranks and a copy of the common manifest. A checkpoint
in the tier is valid if the parts on the nodes of the *current* attempt are complete. If every rank sees all
parts, the checkpoint is loaded from the tier. Otherwise, the parts are first copied to the shared folder, as
in the background copy.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, Manifest
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir, boot_identity
from hpctrain.checkpoint.io.commit import CommitTarget
from hpctrain.checkpoint.io.coordination import RankCoordinator, describe_exception
from hpctrain.checkpoint.io.loading import VerifiedCheckpoint
from hpctrain.checkpoint.tier.tier_copier import (
    LARGE_SUFFIX,
    NodeFiles,
    TierCopier,
    TierCopyFailed,
    find_complete,
    gather_node_files,
)
from hpctrain.errors import CheckpointError
from hpctrain.files import make_private_folder
from hpctrain.rundir import checkpoint_folder_name, list_checkpoint_steps


class LocalTier:
    def __init__(
        self,
        base: Path,
        shared: CommitTarget,
        coordinator: RankCoordinator,
        *,
        limit_bytes: int | None,
        on_copied: Callable[[Manifest, float], None],
        on_failure: Callable[[TierCopyFailed], None],
    ) -> None:
        """Create a folder in `base` on every node, or raise CheckpointError on all ranks (collective)."""
        folder = tier_folder(base, shared.directory.folder)
        token = coordinator.broadcast(secrets.token_hex(4), f"opening the local_checkpoints folder {base}")
        marker = folder / f".rank-{token}-{coordinator.rank}"
        failure = f"the local_checkpoints folder {base} cannot be used"

        def mark() -> None:
            if not base.is_dir():
                raise CheckpointError("the folder does not exist on the node of this rank")
            make_private_folder(folder, "local_checkpoints")
            marker.touch()

        coordinator.run_on_all(mark, failure)
        machines = coordinator.all_gather(boot_identity(), failure)
        markers = coordinator.run_on_all(lambda: list(folder.glob(f".rank-{token}-*")), failure)
        coordinator.run_on_all(marker.unlink, failure)
        members = [int(path.name.rpartition("-")[2]) for path in markers]
        self._shared = shared.directory
        self._limit_bytes, self._num_members = limit_bytes, len(members)
        self.target = CommitTarget(
            shared.coordinator,
            CheckpointDir(folder, durable=False),
            is_leader=coordinator.rank == min(members),
            node_local=True,
            machine=machines[min(members)],
            io_timeout_s=shared.io_timeout_s,
        )
        self._copier = TierCopier(
            self.target, shared, coordinator, on_copied=on_copied, on_failure=on_failure
        )

    def make_room(self, num_bytes: int) -> None:
        """Collective."""
        self._drop_superseded(keep_newest=True)
        self.target.coordinator.run_on_all(
            lambda: self._check_room(num_bytes), "the local_checkpoints folder was not used"
        )

    def _check_room(self, num_bytes: int) -> None:
        folder = self.target.directory.folder
        if lost := self._copier.stop_reason:
            raise CheckpointError(f"copying from {folder} has stopped: {lost}")
        if not self.target.is_leader:
            return
        # Another run removes the folder if this job was suspended for so long that it appeared to have ended.
        make_private_folder(folder, "local_checkpoints")
        disk = shutil.disk_usage(folder)
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        limit = disk.total // 2 if self._limit_bytes is None else self._limit_bytes
        needed = num_bytes * self._num_members
        if used + needed > limit or needed > disk.free:
            raise CheckpointError(
                f"{folder} has no space for {needed} bytes: {used} of {limit} bytes are in use, and the disk "
                f"has {disk.free} bytes free"
            )

    def schedule_copy(self, step: int, *, may_skip: bool) -> None:
        """Schedule a copy; with `may_skip`, a newer step may replace it if copying is slow (collective)."""
        begin = self.target.coordinator.is_main and self._copier.request(step, may_skip=may_skip)
        if self.target.coordinator.broadcast(begin, f"scheduling the copy of step {step}"):
            self._copier.start(step)
        self._drop_superseded(keep_newest=True)

    def close(self, deadline: float | None, *, clean: bool) -> list[str]:
        """Wait for the copies; `clean` removes the tier if all is copied; return messages (collective)."""
        self._copier.finish(deadline)
        if not clean:
            return []
        directory, shared = self.target.directory, self._shared.folder
        try:
            newest, in_shared = (
                max(list_checkpoint_steps(folder), default=-1) for folder in (directory.folder, shared)
            )
        except OSError as error:
            reason = describe_exception(error)
            problem = f"its checkpoints could not be compared with those in {shared}: {reason}"
            return [f"{directory.folder} was kept, because {problem}."]
        if newest > in_shared:
            return [f"Step {newest} exists only in {directory.folder}; it was not copied to {shared}."]
        if self.target.is_leader:
            for step in directory.steps():
                directory.discard(step)  # a kill during the removal must not leave an incomplete checkpoint
            shutil.rmtree(directory.folder, ignore_errors=True)
        return []

    def gather_node_files(self) -> dict[int, list[NodeFiles | None]]:
        """Collective."""
        return gather_node_files(self.target)

    def find(self, step: int, node_files: list[NodeFiles | None]) -> VerifiedCheckpoint:
        """Return the checkpoint of a step if the available parts are complete (collective)."""
        on_nodes = find_complete(self.target, step, node_files)
        if on_nodes.all_ranks_see_all:
            return VerifiedCheckpoint(
                self.target.directory.folder / checkpoint_folder_name(step), on_nodes.manifest
            )
        large = [entry.name for entry in on_nodes.own if entry.name.endswith(LARGE_SUFFIX)]
        self._copier.copy(step, large, on_nodes.small)
        return VerifiedCheckpoint(self._shared.folder / checkpoint_folder_name(step), on_nodes.manifest)

    def reset_to(self, verified: VerifiedCheckpoint | None) -> None:
        """Drop steps that can no longer be loaded; copy the loaded step (collective)."""
        directory = self.target.directory
        in_tier = verified is not None and verified.folder.parent == directory.folder
        step = verified.manifest.step if verified is not None else -1
        self._drop_superseded(keep_newest=in_tier)
        self.target.coordinator.all_gather(None, "clearing the local_checkpoints folder")
        if in_tier and not self._is_in_shared(step):
            self.schedule_copy(step, may_skip=True)

    def _is_in_shared(self, step: int) -> bool:
        path, coordinator = (
            self._shared.folder / checkpoint_folder_name(step) / MANIFEST_NAME,
            self.target.coordinator,
        )
        return coordinator.broadcast(coordinator.is_main and os.path.isfile(path), f"looking for {path}")

    def _drop_superseded(self, *, keep_newest: bool) -> None:
        """Delete all steps except the newest and those not yet copied (collective)."""
        needed = self.target.coordinator.broadcast(
            sorted(self._copier.pending_steps), "clearing the local_checkpoints folder"
        )
        if not self.target.is_leader:
            return
        with suppress(OSError):  # a remaining step only uses space
            for step in self.target.directory.steps()[: -1 if keep_newest else None]:
                if step not in needed:
                    self.target.directory.discard(step)


def tier_folder(base: Path, shared: Path) -> Path:
    home = shared.resolve()
    # Two runs with the same name in different folders must not share a folder.
    return base / f"hpctrain-{home.parent.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(home))}"
