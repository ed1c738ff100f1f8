"""Pause in training during a save, and time until the state is on disk.

    python benchmarks/checkpoint.py [--megabytes N ...] [--tensor-kilobytes N] [--rounds N] [--folder PATH]
                                    [--only compare|disk|links ...] [--ranks N ...]

Every rank has the complete state, as with DDP, and the ranks use gloo. All variants are measured alternately
in each round, by the time of the slowest rank. A copy to preallocated memory is the lower bound for any
background save. hpctrain's `async_save` can be faster, because each rank copies only its share. Calls of
`dcp.async_save` wait for the previous one, as hpctrain's do. The first save includes allocations. Saves by
one, two and four ranks are measured with one disk, and with a simulated link of 100 MB/s for each rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from results import Results

from hpctrain.checkpoint import store
from hpctrain.checkpoint.io import background_io
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore, CommittedSave


def state_of(megabytes: int, tensor_kilobytes: int) -> dict[str, torch.Tensor]:
    """Create a state of the given total size, from tensors of equal size."""
    count = max(1, (megabytes << 10) // tensor_kilobytes)
    numbers = (megabytes << 20) // count // 4
    return {f"layer-{i}": torch.randn(numbers) for i in range(count)}


def slowest(seconds: float) -> float:
    box = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)


def timed(action: Callable[[], object]) -> float:
    """Return the seconds of the slowest rank, after a common start."""
    dist.barrier()
    begun = time.perf_counter()
    action()
    return slowest(time.perf_counter() - begun)


class Measurement:
    """All variants of saving a state, on these ranks."""

    def __init__(self, megabytes: int, folder: Path, options: argparse.Namespace) -> None:
        self.state, self.folder = state_of(megabytes, options.tensor_kilobytes), folder
        self.kept = {name: torch.zeros_like(tensor) for name, tensor in self.state.items()}
        self.store = CheckpointStore(folder / "ours", dist.group.WORLD, retention=Retention(last=1))
        # Messages of its background thread and of hpctrain would mix in a common group.
        self.group = dist.new_group(backend="gloo")
        self.step = 0

    def copy(self) -> float:
        def copy() -> None:
            for name, tensor in self.state.items():
                self.kept[name].copy_(tensor)

        return timed(copy)

    def ours(self, *, prepare: bool = False) -> tuple[float, float]:
        """Return the seconds until training may continue, and until the state is on disk."""
        self.step += 1
        if prepare:
            self.store.prepare(self.state, {})
            time.sleep(2.0)  # a first training step, say
        dist.barrier()
        begun = time.perf_counter()
        self.store.async_save(self.step, self.state, {})
        stall = slowest(time.perf_counter() - begun)
        self.store.wait(600)
        on_disk = slowest(time.perf_counter() - begun)
        (ended,) = self.store.collect_outcomes()
        assert isinstance(ended, CommittedSave), ended
        return stall, on_disk

    def torchs(self) -> tuple[float, float]:
        path = self.folder / "torchs"
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        begun = time.perf_counter()
        future = dcp.async_save(dict(self.state), checkpoint_id=path, process_group=self.group)
        stall = slowest(time.perf_counter() - begun)
        future.result(600)
        return stall, slowest(time.perf_counter() - begun)

    def close(self) -> None:
        self.store.close()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        dist.barrier()


#: Name, values, unit and limit of a result.
Row = tuple[str, list[float], str, float | None]


def compare(folder: Path, options: argparse.Namespace) -> list[Row]:
    """Compare the pauses of all variants, for all sizes."""
    rows: list[Row] = []
    for megabytes in options.megabytes:
        measurement = Measurement(megabytes, folder / str(megabytes), options)
        first, _ = measurement.ours(prepare=True)
        first_torch, _ = measurement.torchs()
        measurement.copy()
        rounds = [
            (measurement.copy(), *measurement.ours(), *measurement.torchs()) for _ in range(options.rounds)
        ]
        measurement.close()
        size = f"{megabytes} MB on {dist.get_world_size()} ranks"
        copy, stall, on_disk, their_stall, their_on_disk = map(list, zip(*rounds, strict=True))
        rows += [
            (f"{size}: copy to preallocated memory", in_ms(copy), "ms", None),
            (f"{size}: pause for async_save", in_ms(stall), "ms", None),
            (f"{size}: pause for dcp.async_save", in_ms(their_stall), "ms", None),
            (f"{size}: first pause for async_save", in_ms([first]), "ms", None),
            (f"{size}: first pause for dcp.async_save", in_ms([first_torch]), "ms", None),
            (f"{size}: pause ÷ copy", divide(stall, copy), "×", 1.3),
            (f"{size}: pause ÷ pause for dcp.async_save", divide(stall, their_stall), "×", 0.3),
            (f"{size}: on disk ÷ dcp.async_save", divide(on_disk, their_on_disk), "×", None),
        ]
    return rows


def in_ms(seconds: list[float]) -> list[float]:
    return [1000 * value for value in seconds]


def divide(ours: list[float], others: list[float]) -> list[float]:
    return [own / other for own, other in zip(ours, others, strict=True)]


def hold_to(megabytes_a_second: float) -> None:
    """Limit the write rate of this process."""
    unlimited = store.bytes_file_write

    def held(name: str, content: memoryview) -> background_io.FileWrite:
        part = unlimited(name, content)

        def blocks() -> Iterator[memoryview]:
            due = time.monotonic()
            for block in part.blocks():
                yield block
                due += len(block) / (megabytes_a_second * 2**20)
                time.sleep(max(0.0, due - time.monotonic()))

        return background_io.FileWrite(name, blocks)

    store.bytes_file_write = held


def scale_with_links(folder: Path, options: argparse.Namespace) -> list[Row]:
    hold_to(options.link)
    return scale(folder, options, f"at {options.link:g} MB/s per rank")


def scale_on_disk(folder: Path, options: argparse.Namespace) -> list[Row]:
    return scale(folder, options, "on one disk")


def scale(folder: Path, options: argparse.Namespace, where: str) -> list[Row]:
    """Measure the duration of a save for growing states."""
    rows: list[Row] = []
    for megabytes in sorted({*options.megabytes, *(2 * size for size in options.megabytes)}):
        measurement = Measurement(megabytes, folder / f"{megabytes}-{dist.get_world_size()}", options)
        measurement.ours()
        on_disk = [measurement.ours()[1] for _ in range(options.rounds)]
        measurement.close()
        name = f"{megabytes} MB saved by {dist.get_world_size()} rank(s) {where}"
        rows.append((name, in_ms(on_disk), "ms", None))
    return rows


PARTS = {"compare": compare, "disk": scale_on_disk, "links": scale_with_links}


def work(rank: int, world_size: int, port: int, what: str, folder: Path, options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    rows = PARTS[what](folder, options)
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(world_size: int, what: str, folder: Path, options: argparse.Namespace) -> list[Row]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    mp.spawn(work, (world_size, port, what, folder, options), nprocs=world_size)
    rows: list[Row] = json.loads((folder / "rows.json").read_text())
    return rows


def main() -> None:
    results = Results(__doc__)
    parser = results.parser
    parser.add_argument("--megabytes", type=int, nargs="+", default=[24, 96])
    parser.add_argument("--tensor-kilobytes", type=int, default=4096, help="size of each tensor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="for compare")
    parser.add_argument("--link", type=float, default=100.0)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts to measure")
    parser.add_argument("--folder", type=Path, help="parent of a new folder for the checkpoints")
    options = results.parse()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for part in options.only:
            for world_size in options.ranks if part == "compare" else (1, 2, 4):
                for row, values, unit, limit in on_ranks(world_size, part, Path(name), options):
                    headline = "÷ pause for dcp" in row and row.startswith("96")
                    results.add(row, values, unit, limit=limit, headline=headline)
    results.finish()


if __name__ == "__main__":
    main()
