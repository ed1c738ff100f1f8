"""Run seeds: `python -m simulation.simulate --seeds 0:1000`.

A failing seed is shrunk: its faults are dropped one by one while it still fails.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from hpctrain import system as real_system
from hpctrain.records import lease
from hpctrain.supervisor import main as supervisor_main
from hpctrain.supervisor import notifications, supervise
from hpctrain.supervisor.launch import srun
from hpctrain.supervisor.workers import attempt_runner, worker_group
from hpctrain.supervisor.launch import auxiliary_step
from simulation import simulated_system
from simulation.config import Fault, make_config, make_faults
from simulation.rank_step import TICK_S, HeartbeatServer
from simulation.scheduler import Scheduler, Violation
from simulation.simulated_disk import simulated_files
from simulation.simulated_slurm import SimPopen
from simulation.world import World

_ROOT = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path("/tmp")


class _Store:
    """Replacement for the rendezvous store."""

    def __init__(self, address: str) -> None:
        self.variables: dict[str, str] = {}

    def serve(self) -> None:
        pass

    def was_used(self) -> bool:
        return True

    def __enter__(self) -> _Store:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _world() -> World:
    return Scheduler.current.world  # type: ignore[attr-defined, no-any-return]


def _kill_orphans(_run: str, before: int) -> list[int]:
    scheduler = Scheduler.current
    scheduler.step()
    assert scheduler.process is not None
    _world().kill_orphans(scheduler.process.host, before)
    return []


def _connect(address: tuple[str, int], timeout: float) -> io.StringIO:
    """Connect to a node's slurmd."""
    simulated_system.sleep(0.01)
    slurm = _world().slurm
    if address[0] in slurm.unresponsive | slurm.down:
        simulated_system.sleep(timeout)
        raise TimeoutError
    return io.StringIO()


class _TraceHandler(logging.Handler):
    """Adds the supervisor's log to the recorded trace."""

    def emit(self, record: logging.LogRecord) -> None:
        scheduler = Scheduler.current
        if scheduler.log is not None and scheduler.process is not None:
            scheduler.log.append(f"{scheduler.now:.3f}   {scheduler.process.name}: {self.format(record)}")


class _NoLog(logging.NullHandler):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.lines = mock.Mock()


@contextlib.contextmanager
def simulated_supervisor(*, log: bool = False) -> Iterator[None]:
    """Replace time, threads, processes, Slurm, the ranks and the disk of the supervisor."""
    names = {name: getattr(simulated_system, name, None) for name in real_system.__all__}
    names |= {"Popen": SimPopen, "create_connection": _connect}
    with contextlib.ExitStack() as stack:

        def put(module: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        for name, value in names.items():
            put(real_system, name, value)
        put(supervisor_main, "load_spec", lambda _: _world().config.spec)
        put(notifications, "load_spec", lambda _: _world().config.spec)
        put(notifications, "_POLL_INTERVAL_S", 20.0)
        put(supervisor_main, "BufferedLogHandler", _NoLog)
        put(supervisor_main, "raise_fd_limit", lambda _: None)
        put(supervise, "kill_orphans", _kill_orphans)
        put(worker_group, "HeartbeatServer", HeartbeatServer)
        put(worker_group, "TICK_INTERVAL_S", TICK_S)
        put(attempt_runner, "RendezvousStore", _Store)
        put(auxiliary_step, "RendezvousStore", _Store)
        put(srun, "_address_of_this_host", lambda hosts: hosts[0])
        put(lease, "_now", lambda _: simulated_system.time())
        stack.enter_context(simulated_files())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        root = logging.getLogger()
        if log:
            put(root, "handlers", [_TraceHandler()])
            put(root, "level", logging.INFO)
        else:
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
        yield


@dataclass(frozen=True)
class SeedResult:
    """Result of a seed."""

    seed: int
    faults: tuple[Fault, ...]
    trace_hash: int
    outcome: str
    violation: str | None = None
    trace: tuple[str, ...] = ()
    num_events: int = 0
    num_steps: int = 0
    seconds: float = 0.0


@functools.cache
def _own_root() -> Path:
    return _ROOT / f"hpctrain-simulation-{os.getpid()}"


def run_seed(seed: int, faults: Sequence[Fault] | None = None, *, record: bool = False) -> SeedResult:
    """Simulate a run, with the faults of the seed or with these faults."""
    root = _own_root()
    folder = root / "run"
    config = make_config(seed, str(folder))
    if config.array_task is not None:
        config = make_config(seed, str(folder / f"task-{config.array_task}"))
    if faults is None:
        faults = make_faults(seed)
    world = World(seed, config, faults, root)
    if record:
        world.scheduler.log = []
    violation = None
    try:
        world.simulate()
    except Violation as error:
        violation = str(error)
    except Exception as error:
        place = next(
            (frame for frame in reversed(traceback.extract_tb(error.__traceback__)) if "/hpctrain/" in frame.filename),
            traceback.extract_tb(error.__traceback__)[-1],
        )
        violation = f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno}, {place.name})"
        if record:
            violation += f"\n{traceback.format_exc()}"
    finally:
        world.close()
    scheduler = world.scheduler
    return SeedResult(
        seed,
        tuple(faults),
        scheduler.trace_hash,
        getattr(world, "outcome", "violation"),
        violation,
        tuple(scheduler.log or ()),
        scheduler.num_events,
        scheduler.num_steps,
        scheduler.now,
    )


def _kind(violation: str) -> str:
    return re.sub(r"\d+", "N", violation)


def shrink(result: SeedResult) -> SeedResult:
    """Return a failure with as few faults of the seed as possible."""
    changed = True
    while changed:
        changed = False
        for i in range(len(result.faults)):
            fewer = [*result.faults[:i], *result.faults[i + 1 :]]
            tried = run_seed(result.seed, fewer)
            if tried.violation is not None and _kind(tried.violation) == _kind(result.violation or ""):
                result, changed = tried, True
                break
    return result


def main() -> int:
    """Run the seeds that the arguments name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", default="0:1000")
    parser.add_argument("--time", type=float)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--max-failures", type=int, default=5)
    args = parser.parse_args()
    first, _, last = args.seeds.partition(":")
    seeds = range(int(first), int(last) if last else int(first) + 1)
    begun, failures, outcomes = time.perf_counter(), 0, Counter[str]()
    out = sys.stdout
    done = events = 0
    with simulated_supervisor(log=args.trace):
        for seed in seeds:
            result = run_seed(seed, record=args.trace)
            done += 1
            events += result.num_events
            outcomes[result.outcome] += 1
            if args.trace and result.violation is None:
                print(*result.trace, sep="\n", file=out)
            if result.violation is not None:
                failures += 1
                small = shrink(result)
                if args.trace:
                    print(*run_seed(seed, small.faults, record=True).trace, sep="\n", file=out)
                print(f"seed {seed}: {small.violation}", *small.faults, sep="\n    ", file=out, flush=True)
                if failures >= args.max_failures:
                    break
            if args.time and time.perf_counter() - begun > args.time:
                break
    seconds = time.perf_counter() - begun
    print(f"{done} seeds in {seconds:.1f} s ({done / seconds:.0f}/s), {events / done:.0f} events each, {failures} failures")
    print(dict(outcomes))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
