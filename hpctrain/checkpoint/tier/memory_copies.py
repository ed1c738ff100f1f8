"""Keep copies of the training state in the memory of the nodes, and turn them into a checkpoint.

Each rank alternates between two files per node that has its part of the state: its own node and, with several
nodes, the next one. A marker, which is removed before and written after the content, names the step. A rank
starts a copy only after the previous one is complete on all ranks. Therefore, at least one step is complete.
"""

from __future__ import annotations

import io
import json
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import torch

from hpctrain.checkpoint.format.dcp_format import StoredChunk, build_tables, rank_file_name
from hpctrain.checkpoint.format.manifest import FileEntry
from hpctrain.checkpoint.io.background_io import file_copy_write
from hpctrain.checkpoint.io.checkpoint_dir import boot_identity
from hpctrain.checkpoint.io.commit import CommitTarget, RankWrite, complete_files, write_and_commit
from hpctrain.checkpoint.io.coordination import PeerLost, RankCoordinator, describe_exception
from hpctrain.checkpoint.io.loading import list_shared_steps
from hpctrain.checkpoint.staging import StagedFile, StateStager, pin_memory
from hpctrain.errors import CheckpointError
from hpctrain.files import own_file, read_json

#: Share of the free memory of a node that copies may use.
_MAX_MEMORY_SHARE = 0.5
#: Reserve for growth of the state, such as more digits in the random state.
_SLACK_BYTES = 1 << 16


class _CopyFile:
    def __init__(self, path: Path) -> None:
        self.path, self.marker = path, path.with_suffix(".json")
        self.memory: mmap.mmap | None = None

    def begin(self, num_bytes: int, gpu: torch.device | None = None) -> mmap.mmap:
        """Remove the marker, and return memory of at least `num_bytes` bytes."""
        self.marker.unlink(missing_ok=True)
        if self.memory is None or len(self.memory) < num_bytes:
            self.memory = None
            self.path.unlink(missing_ok=True)
            fd = own_file(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            try:
                # Without reserved memory, a write to the mapping could end the process with SIGBUS.
                os.posix_fallocate(fd, 0, num_bytes + _SLACK_BYTES)
                self.memory = mmap.mmap(fd, num_bytes + _SLACK_BYTES)
            finally:
                os.close(fd)
            self.memory.madvise(mmap.MADV_DONTFORK)
            if gpu is not None:
                pin_memory(self.memory, gpu)
        return self.memory

    def end(self, marker: bytes) -> None:
        """Write the marker; an incomplete one is not valid JSON, and is ignored."""
        self.marker.write_bytes(marker)


class MemoryCopies:
    """Copies of the state of a training run, as seen by one rank; all methods are collective."""

    def __init__(self, folder: Path, coordinator: RankCoordinator, attempt: int) -> None:
        self._folder, self._coordinator, self._attempt = folder, coordinator, attempt
        machines = coordinator.all_gather((boot_identity(), str(folder)), "copies in memory")
        self._on_node = [
            rank for rank, machine in enumerate(machines) if machine == machines[coordinator.rank]
        ]
        targets = find_neighbors([machines.index(machine) for machine in machines])
        self._target = targets.get(coordinator.rank)
        self._sources = [source for source, target in targets.items() if target == coordinator.rank]
        self._files = {
            rank: [_CopyFile(folder / f"{attempt:03d}-{rank:05d}-{i}") for i in range(2)]
            for rank in (coordinator.rank, *self._sources)
        }
        self._stager = StateStager(coordinator)
        self._images: list[StagedFile | None] = [None, None]
        self._layout: tuple[Any, str] = (None, "")
        self._thread: threading.Thread | None = None
        self._count = self.num_bytes = 0
        self.gpu_s = self.exchange_s = 0.0
        self.problem: str | None = None
        self.failure: str | None = None

    @property
    def has_neighbors(self) -> bool:
        return self._target is not None or bool(self._sources)

    def copy(
        self, step: int, state: Any, rank_state: Mapping[str, torch.Tensor], verified_step: int | None
    ) -> None:
        """Copy the state; the copy is complete after `wait`, or on no rank if it fails on any."""
        self.wait()
        if self.problem is not None:
            return
        slot, rank = self._count % 2, self._coordinator.rank
        plain, items, data, _ = self._stager.plan(state, rank_state)
        image = self._images[slot]
        if image is None or image.items != items:
            image = StagedFile(items)
        if self._count == 0 and not self._fits(image.num_bytes):
            return
        self._count, self.num_bytes = self._count + 1, image.num_bytes
        content, marker, ready = memoryview(b""), b"", None
        try:
            gpu = next((tensor.device for tensor in data if tensor.is_cuda), None)
            memory = self._files[rank][slot].begin(image.num_bytes, gpu)
            if image is not self._images[slot]:
                image.bind_memory(memory)
                self._images[slot] = image
            ready = image.fill(data)
            content = image.content
            marker = self._describe(step, image, plain, verified_step)
        except Exception as error:  # noqa: BLE001 (the other ranks must not wait)
            self.failure, self._images[slot] = describe_exception(error), None
            content, marker = memoryview(b""), b""
        if not self.has_neighbors and (ready is None or not ready.is_pending):
            self._finish(slot, content, marker, ready)
            return
        self._thread = threading.Thread(
            target=self._finish, args=(slot, content, marker, ready), name="hpctrain-copy", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def clear(self) -> None:
        self.wait()
        for copy_file in (of_slot for files in self._files.values() for of_slot in files):
            copy_file.marker.unlink(missing_ok=True)

    def close(self) -> None:
        self.clear()
        for copy_file in (of_slot for files in self._files.values() for of_slot in files):
            copy_file.path.unlink(missing_ok=True)
        with suppress(FileNotFoundError):  # another rank of the node removed the folder meanwhile
            if not any(self._folder.glob("[0-9]*")):
                shutil.rmtree(self._folder, ignore_errors=True)

    def _fits(self, num_bytes: int) -> bool:
        sizes = self._coordinator.all_gather(num_bytes, "the size of the state")
        copies = 4 if self.has_neighbors else 2
        needed, free = copies * sum(sizes[rank] for rank in self._on_node), free_memory(self._folder)
        of_nodes = self._coordinator.all_gather(
            [needed <= _MAX_MEMORY_SHARE * free, needed, free], "free memory"
        )
        for is_enough, required, available in of_nodes:
            if not is_enough:
                self.problem = (
                    f"copies of the state in memory need {required / 2**20:.0f} MiB on a node, more than "
                    f"{_MAX_MEMORY_SHARE:.0%} of the {available / 2**20:.0f} MiB that are free"
                )
        return self.problem is None

    def _describe(self, step: int, image: StagedFile, plain: Any, verified_step: int | None) -> bytes:
        if self._layout[0] is not image.items:
            chunks = image.chunks(self._coordinator.rank)
            self._layout = image.items, json.dumps([astuple(chunk) for chunk in chunks])
        marker = {
            "step": step,
            "rank": self._coordinator.rank,
            "world_size": self._coordinator.world_size,
            "attempt": self._attempt,
            "bytes": image.num_bytes,
            "verified_step": verified_step,
            "plain": plain,
        }
        return f'{json.dumps(marker)[:-1]}, "chunks": {self._layout[1]}}}'.encode()

    def _finish(self, slot: int, content: memoryview, marker: bytes, ready: Any) -> None:
        try:
            if ready is not None and marker:
                ready.synchronize()
                self.gpu_s = ready.seconds
                self._files[self._coordinator.rank][slot].end(marker)
            if self.has_neighbors:
                begun = time.monotonic()
                self._exchange(slot, content, marker)
                self.exchange_s = time.monotonic() - begun
        except (OSError, RuntimeError, PeerLost) as error:
            self.failure = describe_exception(error)

    def _exchange(self, slot: int, content: memoryview, marker: bytes) -> None:
        sizes = torch.tensor([len(content), len(marker)])
        received = {source: torch.empty_like(sizes) for source in self._sources}
        waiting_for = "copies of the state on other nodes"
        self._coordinator.exchange(sizes, self._target, received, waiting_for)
        contents, markers = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        for source, tensor in received.items():
            num_bytes, marker_bytes = tensor.tolist()
            memory: mmap.mmap | bytearray = bytearray(num_bytes + 1)
            try:
                memory = self._files[source][slot].begin(num_bytes)
            except OSError as error:  # the other rank sends the copy anyway
                self.failure = describe_exception(error)
            contents[source] = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
            markers[source] = torch.empty(marker_bytes, dtype=torch.uint8)
        for outgoing, incoming in ((content, contents), (bytearray(marker), markers)):
            tensor = torch.frombuffer(outgoing, dtype=torch.uint8) if outgoing else torch.empty(0)
            self._coordinator.exchange(tensor, self._target, incoming, waiting_for)
        for source, tensor in markers.items():
            if len(tensor) and self._files[source][slot].memory is not None:
                self._files[source][slot].end(tensor.numpy().tobytes())


def find_neighbors(leaders: list[int]) -> dict[int, int]:
    """Return the rank on the next node that stores a copy of each rank's part; empty with a single node."""
    nodes = [
        [rank for rank, leader_of_rank in enumerate(leaders) if leader_of_rank == leader]
        for leader in sorted(set(leaders))
    ]
    if len(nodes) == 1:
        return {}
    return {
        rank: neighbors[i % len(neighbors)]
        for node, neighbors in zip(nodes, [*nodes[1:], nodes[0]], strict=True)
        for i, rank in enumerate(node)
    }


def free_memory(folder: Path) -> int:
    """Return the free bytes in `folder`, within the memory limits of the node and of this job."""
    free = [shutil.disk_usage(folder).free]
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]))
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                free += _free_in_cgroup(Path("/sys/fs/cgroup"), path, ("memory.max", "memory.current"))
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
                free += _free_in_cgroup(Path("/sys/fs/cgroup/memory"), path, names)
    return max(0, min(free))


def _free_in_cgroup(root: Path, path: str, names: tuple[str, str]) -> Iterator[int]:
    """Yield the free memory of a cgroup and those above it; caches of files count as free."""
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        if not folder.is_relative_to(root):
            return
        with suppress(OSError, ValueError):  # no limit has the value `max`
            limit, used = (int((folder / name).read_text()) for name in names)
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield limit - used + int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def commit_newest_copy(
    folder: Path, target: CommitTarget, checked: Callable[[str], bool] | None, limit: int | None = None
) -> str | None:
    """Collective. Write the newest complete copy, if newer than all checkpoints, and remove all copies."""
    coordinator = target.coordinator
    markers = _read_markers(folder)
    of_ranks = coordinator.all_gather(
        [(_key(marker), marker["rank"]) for marker in markers.values()],
        f"the copies of the state in {folder}",
    )
    holders: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    for holder, copies in enumerate(of_ranks):
        for key, source in copies:
            holders.setdefault(key, {}).setdefault(source, []).append(holder)
    complete = [
        key
        for key, sources in holders.items()
        if len(sources) == key[2] and (limit is None or key[0] <= limit)
    ]
    newest, problem = max(complete, default=None), None
    newest_checkpoint = next(list_shared_steps(target), 0)
    if newest is not None and newest[0] > newest_checkpoint:
        mine = {
            path: marker
            for path, marker in markers.items()
            if _key(marker) == newest
            and _choose(holders[newest][marker["rank"]], marker["rank"]) == coordinator.rank
        }
        try:
            _commit(target, mine, newest[0], checked)
        except CheckpointError as error:
            if isinstance(error, PeerLost) or not newest_checkpoint:
                raise
            problem = f"{error}. The newest checkpoint is used instead."
    coordinator.all_gather(None, f"the copies of the state in {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    coordinator.all_gather(None, f"the removal of {folder}")
    return problem


def _key(marker: Mapping[str, Any]) -> tuple[int, int, int]:
    return marker["step"], marker["attempt"], marker["world_size"]


def _choose(holders: list[int], source: int) -> int:
    """Return the rank that writes the part of `source`, to divide the work among the ranks of a node."""
    return source if source in holders else holders[source % len(holders)]


def _read_markers(folder: Path) -> dict[Path, dict[str, Any]]:
    markers: dict[Path, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        with suppress(OSError, ValueError):
            markers.setdefault(path.with_suffix(""), read_json(path, follow_links=False))
    return markers


def _commit(
    target: CommitTarget,
    copies: Mapping[Path, dict[str, Any]],
    step: int,
    checked: Callable[[str], bool] | None,
) -> None:
    writes = []
    for path, marker in copies.items():
        os.truncate(path, marker["bytes"])
        writes.append(replace(file_copy_write(path), name=rank_file_name(marker["rank"])))

    def seal(entries: list[FileEntry], remarks: list[list[dict[str, Any]]]) -> dict[str, bytes]:
        markers = sorted(
            (marker for of_rank in remarks for marker in of_rank), key=lambda marker: marker["rank"]
        )
        return complete_files(
            build_tables(StoredChunk(*chunk) for marker in markers for chunk in marker["chunks"]),
            markers[0]["plain"],
            entries,
            step=step,
            world_size=markers[0]["world_size"],
            time=time.time(),
            score=None,
            finite=None if checked is None else all(marker["finite"] for marker in markers),
            verified_step=markers[0]["verified_step"],
        )

    def remark() -> list[dict[str, Any]]:
        return [
            {**marker, "finite": checked is None or _is_finite(path, marker["chunks"], checked)}
            for path, marker in copies.items()
        ]

    write_and_commit(target, step, RankWrite(writes, seal, remark))


def _is_finite(path: Path, chunks: list[Any], checked: Callable[[str], bool]) -> bool:
    content = memoryview(path.read_bytes())
    for chunk in (StoredChunk(*fields) for fields in chunks):
        if checked(chunk.key):
            data = io.BytesIO(content[chunk.offset : chunk.offset + chunk.length])
            tensor = torch.load(data, weights_only=True)
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                return False
    return True
