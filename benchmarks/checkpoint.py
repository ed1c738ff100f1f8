"""Stall of the training by a save, and total duration of a save.

    python benchmarks/checkpoint.py [--megabytes N ...] [--tensor-kilobytes N] [--rounds N] [--folder PATH]
                                    [--only compare|disk|links ...] [--ranks N ...]

All variants are measured alternately in each round, on several ranks with gloo, for states of several sizes
per rank:

- copy: copy of the state to preallocated memory, the lower bound for any background save
- begin: `CheckpointStore.async_save`, after which training may continue
- dcp.async_save: torch's function; each call must finish before the next call, as in hpctrain
- the time until the state is on disk in each case
- the same save by one, two and four ranks and for growing states, on one disk, and with the rate of each rank
  limited to --link MB/s, as with a separate network link

The time of the slowest rank is used, and the median of the rounds. The first round is shown separately,
because it includes allocations. Exits with 1 if the stall exceeds the limits (see --help).
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp

from hpctrain.checkpoint import saver
from hpctrain.checkpoint.io import file_writer
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore, CommittedSave


def state_of(megabytes: int, tensor_kilobytes: int) -> dict[str, torch.Tensor]:
    """Create a state like an optimizer's: tensors of one size, and a smaller rest."""
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


def compare(rank: int, folder: Path, options: argparse.Namespace) -> bool:
    """Return true if the stalls are within their limits for all sizes."""
    fine = True
    for megabytes in options.megabytes:
        measurement = Measurement(megabytes, folder / str(megabytes), options)
        first, _ = measurement.ours(prepare=True)
        first_torch, _ = measurement.torchs()
        measurement.copy()
        rounds = [
            (measurement.copy(), *measurement.ours(), *measurement.torchs()) for _ in range(options.rounds)
        ]
        measurement.close()
        copy, stall, on_disk, their_stall, their_on_disk = map(statistics.median, zip(*rounds, strict=True))
        to_copy, to_theirs = stall / copy, stall / their_stall
        fine &= to_copy <= options.limit_copy and to_theirs <= options.limit_dcp
        if rank == 0:
            print(
                f"\n{megabytes} MB on {dist.get_world_size()} ranks, ms (median of {options.rounds} rounds)"
            )
            print(f"  copy into kept memory   {copy * 1000:8.1f}")
            print(f"  begin                   {stall * 1000:8.1f}   first, prepared {first * 1000:8.1f}")
            print(f"  dcp.async_save          {their_stall * 1000:8.1f}   first {first_torch * 1000:18.1f}")
            print(f"  begin / copy            {to_copy:8.2f}   (limit {options.limit_copy})")
            print(f"  begin / dcp.async_save  {to_theirs:8.2f}   (limit {options.limit_dcp})")
            print(
                f"  until on disk: ours     {on_disk * 1000:8.1f}   torch's {their_on_disk * 1000:8.1f}",
                flush=True,
            )
    return fine


def hold_to(megabytes_a_second: float) -> None:
    """Limit the write rate of this process."""
    unlimited = saver.write_of_bytes

    def held(name: str, content: memoryview) -> file_writer.FileWrite:
        part = unlimited(name, content)

        def blocks() -> Iterator[memoryview]:
            due = time.monotonic()
            for block in part.blocks():
                yield block
                due += len(block) / (megabytes_a_second * 2**20)
                time.sleep(max(0.0, due - time.monotonic()))

        return file_writer.FileWrite(name, blocks)

    saver.write_of_bytes = held


def scale_with_links(rank: int, folder: Path, options: argparse.Namespace) -> bool:
    hold_to(options.link)
    return scale(rank, folder, options)


def scale(rank: int, folder: Path, options: argparse.Namespace) -> bool:
    """Print the duration of a save for growing states."""
    for megabytes in sorted({*options.megabytes, *(2 * m for m in options.megabytes)}):
        measurement = Measurement(megabytes, folder / f"{megabytes}-{dist.get_world_size()}", options)
        measurement.ours()
        times = [measurement.ours() for _ in range(options.rounds)]
        measurement.close()
        stall, on_disk = (statistics.median(column) for column in zip(*times, strict=True))
        if rank == 0:
            print(
                f"  {dist.get_world_size()} ranks  {megabytes:5d} MB   stall {stall * 1000:7.1f}   "
                f"on disk {on_disk * 1000:8.1f}   {on_disk * 1e6 / megabytes:6.0f} µs a MB",
                flush=True,
            )
    return True


PARTS = {"compare": compare, "disk": scale, "links": scale_with_links}


def work(rank: int, world_size: int, port: int, what: str, folder: Path, options: argparse.Namespace) -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    fine = PARTS[what](rank, folder, options)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(0 if fine else 1)


def on_ranks(world_size: int, what: str, folder: Path, options: argparse.Namespace) -> bool:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    try:
        mp.spawn(work, (world_size, port, what, folder, options), nprocs=world_size)
    except mp.ProcessExitedException as error:
        if error.exit_code != 1:
            raise
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[24, 96, 384])
    parser.add_argument("--tensor-kilobytes", type=int, default=4096, help="size of each tensor")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="for compare")
    parser.add_argument("--link", type=float, default=100.0)
    parser.add_argument("--only", choices=PARTS, nargs="+", default=PARTS, help="parts to measure")
    parser.add_argument("--folder", type=Path, help="parent of a new folder for the checkpoints")
    parser.add_argument("--limit-copy", type=float, default=1.3)
    parser.add_argument("--limit-dcp", type=float, default=0.3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        compared = options.ranks if "compare" in options.only else []
        # All parts are measured, even if one exceeds a limit.
        fine = False not in [on_ranks(world_size, "compare", Path(name), options) for world_size in compared]
        for what, where in (("disk", "one disk"), ("links", f"{options.link:g} MB/s a rank")):
            if what in options.only:
                print(f"\nUntil on disk, ms ({where})")
                for world_size in (1, 2, 4):
                    on_ranks(world_size, what, Path(name), options)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
