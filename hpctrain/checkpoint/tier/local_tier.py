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
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import xxhash

from hpctrain.checkpoint.format.dcp_format import rank_file_name
from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest, make_entry
from hpctrain.checkpoint.io.background_io import file_copy_write
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir, boot_identity
from hpctrain.checkpoint.io.commit import CommitTarget, RankWrite, write_and_commit
from hpctrain.checkpoint.io.coordination import PeerLost, RankCoordinator, describe_exception
from hpctrain.checkpoint.io.loading import VerifiedCheckpoint, check_files, check_on_all
from hpctrain.errors import CheckpointError, CorruptCheckpoint
from hpctrain.files import make_private_folder, read_regular
from hpctrain.rundir import checkpoint_folder_name, list_checkpoint_steps

#: Suffix of the files that exist only on the node of the writing rank; every node has a copy of other files.
_LARGE_SUFFIX = ".distcp"
#: The files of a step in the folder of a node: checksum of the manifest, and names of the files whose size
#: matches the manifest.
NodeFiles = tuple[str, list[str]]


def read_small_files(path: Path) -> dict[str, bytes]:
    return {
        entry.name: entry.read_bytes() for entry in path.iterdir() if not entry.name.endswith(_LARGE_SUFFIX)
    }


def _local_node_files(folder: Path) -> dict[int, NodeFiles]:
    of_steps: dict[int, NodeFiles] = {}
    for step in list_checkpoint_steps(folder):
        path = folder / checkpoint_folder_name(step)
        try:
            content = read_regular(path / MANIFEST_NAME)
            files = Manifest.decode(content, path).files
            names = sorted(
                entry.name
                for entry in files
                if (path / entry.name).is_file() and (path / entry.name).stat().st_size == entry.bytes
            )
        except (OSError, CheckpointError):
            content, names = b"", []
        of_steps[step] = xxhash.xxh3_128_hexdigest(content), names
    return of_steps


class TierCopyFailed(CheckpointError):
    """Error for a checkpoint that could not be copied and exists only in the local tier."""


class LocalTier:
    """The local tier of a run, as seen by one rank; all methods are collective."""

    def __init__(
        self,
        base: Path,
        shared: CommitTarget,
        coordinator: RankCoordinator,
        *,
        on_copied: Callable[[Manifest, float], None],
        on_failure: Callable[[TierCopyFailed], None],
    ) -> None:
        """Create a folder in `base` on every node, or raise CheckpointError on all ranks."""
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
        self._num_members = len(members)
        self.target = CommitTarget(
            shared.coordinator,
            CheckpointDir(folder, durable=False),
            is_leader=coordinator.rank == min(members),
            node_local=True,
            machine=machines[min(members)],
            io_timeout_s=shared.io_timeout_s,
        )
        # Steps are copied one at a time, by all ranks together; rank 0 has the list.
        self._copied = replace(shared, coordinator=coordinator)
        self._on_copied, self._on_failure = on_copied, on_failure
        self._lock = threading.Lock()
        self._pending: list[tuple[int, bool]] = []
        self._is_copying = False
        self._in_use: set[int] = set()
        self._thread: threading.Thread | None = None
        self._abort = threading.Event()

    def make_room(self, num_bytes: int) -> None:
        self._drop_superseded(keep_newest=True)
        self.target.coordinator.run_on_all(
            lambda: self._check_room(num_bytes), "the local_checkpoints folder was not used"
        )

    def _check_room(self, num_bytes: int) -> None:
        folder = self.target.directory.folder
        if lost := self._copied.coordinator.lost_reason:
            raise CheckpointError(f"copying from {folder} has stopped: {lost}")
        if not self.target.is_leader:
            return
        # Another run removes the folder if this job was suspended for so long that it appeared to have ended.
        make_private_folder(folder, "local_checkpoints")
        disk = shutil.disk_usage(folder)
        used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        limit, needed = disk.total // 2, num_bytes * self._num_members
        if used + needed > limit or needed > disk.free:
            raise CheckpointError(
                f"{folder} has no space for {needed} bytes: {used} of {limit} bytes are in use, and the disk "
                f"has {disk.free} bytes free"
            )

    def schedule_copy(self, step: int, *, may_skip: bool) -> None:
        """Schedule a copy; with `may_skip`, a newer step may replace it if copying is slow."""
        begin = self.target.coordinator.is_main and self._request(step, may_skip=may_skip)
        if self.target.coordinator.broadcast(begin, f"scheduling the copy of step {step}"):
            if self._thread is not None:
                self._thread.join()  # the end has already been requested
            self._thread = threading.Thread(
                target=self._copy_all, args=(step,), name="hpctrain-checkpoint-copying", daemon=True
            )
            self._thread.start()
        self._drop_superseded(keep_newest=True)

    def _request(self, step: int, *, may_skip: bool) -> bool:
        """Queue a step on rank 0; return True if all ranks must start copying."""
        with self._lock:
            if not self._is_copying:
                self._is_copying, self._in_use = True, {step}
                return True
            if self._pending and self._pending[-1][1]:
                self._pending.pop()
            self._pending.append((step, may_skip))
            return False

    def close(self, deadline: float | None, *, clean: bool) -> list[str]:
        """Wait for the copies; `clean` removes the tier if all is copied; return messages."""
        if self._thread is not None:
            self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if self._thread.is_alive():
                self._abort.set()
                self._thread.join()
        if not clean:
            return []
        directory, shared = self.target.directory, self._copied.directory.folder
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
        coordinator, folder = self.target.coordinator, self.target.directory.folder
        of_node = coordinator.run_on_all(lambda: _local_node_files(folder), f"{folder} cannot be listed")
        of_ranks = coordinator.all_gather(of_node, "listing the local_checkpoints folder")
        steps = {step for of_rank in of_ranks for step in of_rank}
        return {step: [of_rank.get(step) for of_rank in of_ranks] for step in steps}

    def find(self, step: int, node_files: list[NodeFiles | None]) -> VerifiedCheckpoint:
        """Return the checkpoint of a step if the available parts are complete."""
        coordinator = self.target.coordinator
        path = self.target.directory.folder / checkpoint_folder_name(step)
        # If two attempts saved this step, use the version that more ranks see.
        kinds = [checksum for checksum, _ in filter(None, node_files)]
        kind = max(sorted(set(kinds)), key=kinds.count)
        names = {rank: set(files[1]) for rank, files in enumerate(node_files) if files and files[0] == kind}
        holders = list(names)
        reads = coordinator.rank == holders[0]
        own_small = check_on_all(coordinator, lambda _: read_small_files(path) if reads else None)
        small = next(filter(None, coordinator.all_gather(own_small, f"reading {path}")), {})
        manifest = Manifest.decode(small.get(MANIFEST_NAME, b""), path)
        shares, loads = {rank: list[FileEntry]() for rank in holders}, dict.fromkeys(holders, 0)
        for entry in manifest.files:
            seeing = [rank for rank in holders if entry.name in names[rank]]
            if not seeing:
                raise CorruptCheckpoint(
                    f"{path} is incomplete: no node of this attempt has a complete copy of {entry.name}."
                )
            rank = min(seeing, key=lambda rank: loads[rank])
            shares[rank].append(entry)
            loads[rank] += entry.bytes
        share = shares.get(coordinator.rank, [])
        check_files(coordinator, path, share, all_see_it=False)
        everything = {entry.name for entry in manifest.files}
        if len(holders) == coordinator.world_size and all(seen >= everything for seen in names.values()):
            return VerifiedCheckpoint(path, manifest)
        large = [entry.name for entry in share if entry.name.endswith(_LARGE_SUFFIX)]
        self._copy(step, large, small)
        return VerifiedCheckpoint(self._copied.directory.folder / path.name, manifest)

    def reset_to(self, verified: VerifiedCheckpoint | None) -> None:
        """Drop steps that can no longer be loaded; copy the loaded step."""
        directory = self.target.directory
        in_tier = verified is not None and verified.folder.parent == directory.folder
        step = verified.manifest.step if verified is not None else -1
        self._drop_superseded(keep_newest=in_tier)
        self.target.coordinator.all_gather(None, "clearing the local_checkpoints folder")
        path, coordinator = (
            self._copied.directory.folder / checkpoint_folder_name(step),
            self.target.coordinator,
        )
        if in_tier and not coordinator.broadcast(
            coordinator.is_main and os.path.isfile(path / MANIFEST_NAME), f"looking for {path}"
        ):
            self.schedule_copy(step, may_skip=True)

    def _drop_superseded(self, *, keep_newest: bool) -> None:
        """Delete all steps except the newest and those not yet copied."""
        with self._lock:
            pending = sorted(self._in_use.union(step for step, _ in self._pending))
        needed = self.target.coordinator.broadcast(pending, "clearing the local_checkpoints folder")
        if not self.target.is_leader:
            return
        with suppress(OSError):  # a remaining step only uses space
            for step in self.target.directory.steps()[: -1 if keep_newest else None]:
                if step not in needed:
                    self.target.directory.discard(step)

    def _copy(self, step: int, large: Iterable[str], small: Mapping[str, bytes] | None) -> Manifest:
        """Copy a step, with this rank's `large` files; without `small`, rank 0 reads them."""
        path = self.target.directory.folder / checkpoint_folder_name(step)

        def seal(copied: list[FileEntry], _: object) -> Mapping[str, bytes]:
            files = read_small_files(path) if small is None else small
            for entry in Manifest.decode(files[MANIFEST_NAME], path).files:
                if entry not in copied and make_entry(entry.name, files.get(entry.name, b"")) != entry:
                    raise CorruptCheckpoint(f"{path / entry.name} has changed since it was written.")
            return files

        write = RankWrite(
            [file_copy_write(path / name) for name in large], seal, lambda: None, abort=self._abort
        )
        return write_and_commit(self._copied, step, write)

    def _copy_all(self, first_step: int) -> None:
        step: int | None = first_step
        while step is not None:
            begun = time.monotonic()
            try:
                manifest = self._copy_shares(step)
            except CheckpointError as error:
                self._on_failure(TierCopyFailed(str(error)))
            else:
                self._on_copied(manifest, begun)
            try:
                step = self._copied.coordinator.broadcast(self._next_step(), "the next step to copy")
            except PeerLost:
                return  # The next save reports the error.

    def _copy_shares(self, step: int) -> Manifest:
        """Copy a step, and divide its large files among the ranks that see them."""
        failure = f"step {step} was not copied from {self.target.directory.folder}"
        names = self._copied.coordinator.run_on_all(lambda: self._large_files(step), failure)
        names_of_ranks = self._copied.coordinator.all_gather(names, failure)
        shares: dict[str, int] = {}
        for name in {name for names in names_of_ranks for name in names}:
            holders = [rank for rank, names in enumerate(names_of_ranks) if name in names]
            # The rank that wrote the file, if it exists in this attempt.
            shares[name] = min(holders, key=lambda rank: (rank_file_name(rank) != name, rank))
        large = sorted(name for name, rank in shares.items() if rank == self._copied.coordinator.rank)
        return self._copy(step, large, None)

    def _large_files(self, step: int) -> list[str]:
        path = self.target.directory.folder / checkpoint_folder_name(step)
        return [file.name for file in path.glob(f"*{_LARGE_SUFFIX}")]

    def _next_step(self) -> int | None:
        if not self._copied.coordinator.is_main:
            return None
        with self._lock:
            if self._pending and not self._abort.is_set():
                step = self._pending.pop(0)[0]
                self._in_use = {step}
                return step
            self._is_copying, self._in_use = False, set()
            return None


def tier_folder(base: Path, shared: Path) -> Path:
    home = shared.resolve()
    # Two runs with the same name in different folders must not share a folder.
    return base / f"hpctrain-{home.parent.name}-{xxhash.xxh3_64_hexdigest(os.fsencode(home))}"
