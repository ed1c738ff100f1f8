"""Background copies of checkpoints from the node folders to the shared folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from hpctrain.checkpoint.format.dcp_format import rank_file_name
from hpctrain.checkpoint.format.manifest import MANIFEST_NAME, FileEntry, Manifest, make_entry
from hpctrain.checkpoint.io.commit import CommitTarget, RankWrite, write_and_commit
from hpctrain.checkpoint.io.coordination import PeerLost, RankCoordinator
from hpctrain.checkpoint.io.file_writer import file_copy_write
from hpctrain.checkpoint.tier.node_files import LARGE_SUFFIX, read_small_files
from hpctrain.errors import CheckpointError, CorruptCheckpoint
from hpctrain.rundir import checkpoint_folder_name


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
        """Steps not yet copied, on rank 0."""
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
        """Copy this step and steps requested during the copy (collective)."""
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

        own = RankWrite(
            [file_copy_write(path / name) for name in large], seal, lambda: None, abort=self._abort
        )
        return write_and_commit(self._shared, step, own)

    def _copy_all(self, first: int) -> None:
        step: int | None = first
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
        own = self._coordinator.run_on_all(lambda: self._large_files(step), failure)
        seen = self._coordinator.all_gather(own, failure)
        shares: dict[str, int] = {}
        for name in {name for names in seen for name in names}:
            holders = [rank for rank, names in enumerate(seen) if name in names]
            # The rank that wrote the file, if it exists in this attempt.
            shares[name] = min(holders, key=lambda rank: (rank_file_name(rank) != name, rank))
        large = sorted(name for name, rank in shares.items() if rank == self._coordinator.rank)
        return self.copy(step, large, None)

    def _large_files(self, step: int) -> list[str]:
        path = self._nodes.directory.folder / checkpoint_folder_name(step)
        return [each.name for each in path.glob(f"*{LARGE_SUFFIX}")]

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
