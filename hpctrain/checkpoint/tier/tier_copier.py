"""Find the checkpoint files on the nodes, and copy them to the shared folder in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from hpctrain.checkpoint.format.dcp_format import rank_file_name
from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest, make_entry
from hpctrain.checkpoint.io.commit import CommitTarget, RankWrite, write_and_commit
from hpctrain.checkpoint.io.coordination import PeerLost, RankCoordinator
from hpctrain.checkpoint.io.file_writer import file_copy_write
from hpctrain.checkpoint.io.loading import check_files, check_on_all
from hpctrain.errors import CheckpointError, CorruptCheckpoint
from hpctrain.files import read_regular
from hpctrain.rundir import checkpoint_folder_name, list_checkpoint_steps

#: Suffix of the files that exist only on the node of the writing rank; every node has a copy of other files.
LARGE_SUFFIX = ".distcp"


#: The files of a step in the folder of a node: checksum of the manifest, and names of the files whose size
#: matches the manifest.
NodeFiles = tuple[str, list[str]]


@dataclass(frozen=True)
class NodeCheckpoint:
    manifest: Manifest
    small: dict[str, bytes]
    """Content of all files except the large ones."""
    own: Sequence[FileEntry]
    all_ranks_see_all: bool
    """True if each rank sees every file."""


def gather_node_files(target: CommitTarget) -> dict[int, list[NodeFiles | None]]:
    """Collective."""
    coordinator, folder = target.coordinator, target.directory.folder
    of_node = coordinator.run_on_all(lambda: _local_node_files(folder), f"{folder} cannot be listed")
    of_ranks = coordinator.all_gather(of_node, "listing the local_checkpoints folder")
    steps = {step for of_rank in of_ranks for step in of_rank}
    return {step: [of_rank.get(step) for of_rank in of_ranks] for step in steps}


def find_complete(target: CommitTarget, step: int, node_files: list[NodeFiles | None]) -> NodeCheckpoint:
    """Collective."""
    coordinator, path = target.coordinator, target.directory.folder / checkpoint_folder_name(step)
    # If two attempts saved this step, use the version that more ranks see.
    kinds = [checksum for checksum, _ in filter(None, node_files)]
    kind = max(sorted(set(kinds)), key=kinds.count)
    names = {rank: set(files[1]) for rank, files in enumerate(node_files) if files and files[0] == kind}
    holders = list(names)
    reads = coordinator.rank == holders[0]
    own_small = check_on_all(coordinator, lambda _: read_small_files(path) if reads else None)
    small = next(files for files in coordinator.all_gather(own_small, f"reading {path}") if files is not None)
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
    all_see_all = len(holders) == coordinator.world_size and all(
        names_of_rank >= everything for names_of_rank in names.values()
    )
    return NodeCheckpoint(manifest, small, share, all_see_all)


def read_small_files(path: Path) -> dict[str, bytes]:
    return {
        entry.name: entry.read_bytes() for entry in path.iterdir() if not entry.name.endswith(LARGE_SUFFIX)
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


class TierCopier:
    """Copier of steps, one at a time, by all ranks together; rank 0 has the list."""

    def __init__(
        self,
        nodes: CommitTarget,
        shared: CommitTarget,
        coordinator: RankCoordinator,
        *,
        on_copied: Callable[[Manifest, float], None],
        on_failure: Callable[[TierCopyFailed], None],
    ) -> None:
        self._nodes, self._shared = nodes, replace(shared, coordinator=coordinator)
        self._coordinator = coordinator
        self._on_copied, self._on_failure = on_copied, on_failure
        self._lock = threading.Lock()
        self._pending: list[tuple[int, bool]] = []
        self._is_copying = False
        self._in_use: set[int] = set()
        self._thread: threading.Thread | None = None
        self._abort = threading.Event()

    @property
    def stop_reason(self) -> str | None:
        return self._coordinator.lost_reason

    @property
    def pending_steps(self) -> set[int]:
        with self._lock:
            return self._in_use | {step for step, _ in self._pending}

    def request(self, step: int, *, may_skip: bool) -> bool:
        """Queue a step on rank 0; return True if all ranks must `start`."""
        with self._lock:
            if not self._is_copying:
                self._is_copying, self._in_use = True, {step}
                return True
            if self._pending and self._pending[-1][1]:
                self._pending.pop()
            self._pending.append((step, may_skip))
            return False

    def start(self, step: int) -> None:
        """Collective."""
        if self._thread is not None:
            self._thread.join()  # the end has already been requested
        self._thread = threading.Thread(
            target=self._copy_all, args=(step,), name="hpctrain-checkpoint-copying", daemon=True
        )
        self._thread.start()

    def finish(self, deadline: float | None) -> None:
        """Wait until all copies have ended; at the deadline, all ranks abort."""
        if self._thread is None:
            return
        self._thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._abort.set()
            self._thread.join()

    def copy(self, step: int, large: Iterable[str], small: Mapping[str, bytes] | None) -> Manifest:
        """Copy a step, with this rank's `large` files; without `small`, rank 0 reads them (collective)."""
        path = self._nodes.directory.folder / checkpoint_folder_name(step)

        def seal(everything: list[tuple[list[FileEntry], None]]) -> Mapping[str, bytes]:
            files = read_small_files(path) if small is None else small
            copied = {entry for entries, _ in everything for entry in entries}
            for entry in Manifest.decode(files[MANIFEST_NAME], path).files:
                if entry not in copied and make_entry(entry.name, files.get(entry.name, b"")) != entry:
                    raise CorruptCheckpoint(f"{path / entry.name} has changed since it was written.")
            return files

        write = RankWrite(
            [file_copy_write(path / name) for name in large], seal, lambda: None, abort=self._abort
        )
        return write_and_commit(self._shared, step, write)

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
                step = self._coordinator.broadcast(self._next_step(), "the next step to copy")
            except PeerLost:
                return  # The next save reports the error.

    def _copy_shares(self, step: int) -> Manifest:
        """Copy a step, and divide its large files among the ranks that see them (collective)."""
        failure = f"step {step} was not copied from {self._nodes.directory.folder}"
        names = self._coordinator.run_on_all(lambda: self._large_files(step), failure)
        names_of_ranks = self._coordinator.all_gather(names, failure)
        shares: dict[str, int] = {}
        for name in {name for names in names_of_ranks for name in names}:
            holders = [rank for rank, names in enumerate(names_of_ranks) if name in names]
            # The rank that wrote the file, if it exists in this attempt.
            shares[name] = min(holders, key=lambda rank: (rank_file_name(rank) != name, rank))
        large = sorted(name for name, rank in shares.items() if rank == self._coordinator.rank)
        return self.copy(step, large, None)

    def _large_files(self, step: int) -> list[str]:
        path = self._nodes.directory.folder / checkpoint_folder_name(step)
        return [file.name for file in path.glob(f"*{LARGE_SUFFIX}")]

    def _next_step(self) -> int | None:
        if not self._coordinator.is_main:
            return None
        with self._lock:
            if self._pending and not self._abort.is_set():
                step = self._pending.pop(0)[0]
                self._in_use = {step}
                return step
            self._is_copying, self._in_use = False, set()
            return None
