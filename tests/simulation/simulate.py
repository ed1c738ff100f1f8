"""Run seeds of the simulation. A failing seed is shrunk, and printed with the command that repeats it."""

import argparse
import contextlib
import functools
import gc
import io
import logging
import math
import multiprocessing
import os
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from hpctrain import system as real_system
from hpctrain.records import lease
from hpctrain.supervisor import batch_main, notifications, supervise
from hpctrain.supervisor.launch import step_launchers
from hpctrain.supervisor.workers import attempt_runner, node_steps, worker_group
from simulation import simulated_system
from simulation.config import Fault, make_config, make_faults
from simulation.rank_step import HeartbeatServer
from simulation.scheduler import Scheduler, Violation
from simulation.simulated_disk import simulated_files
from simulation.simulated_slurm import SimPopen
from simulation.world import World

#: Seconds between searches for requests of the user, which the simulation does not make.
_REQUESTS_INTERVAL_S = 60.0
_ROOT = Path("/dev/shm") if os.path.isdir("/dev/shm") else Path("/tmp")


class _Store:
    """Replacement for the rendezvous store."""

    def __init__(self, address: str, *, hosted: bool = False) -> None:
        self.variables: dict[str, str] = {}

    def serve(self) -> None:
        pass

    def __enter__(self) -> "_Store":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _world() -> World:
    return Scheduler.current.world


def _kill_orphans(_run: str, before: int = sys.maxsize) -> list[int]:
    scheduler = Scheduler.current
    scheduler.step()
    assert scheduler.process is not None
    _world().kill_orphans(scheduler.process.host, before)
    return []


def _connect(address: tuple[str, int], timeout: float) -> io.StringIO:
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
        self.lines = self

    def flush(self) -> None:
        pass


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
        put(batch_main, "load_spec", lambda _: _world().config.spec)
        put(notifications, "load_spec", lambda _: _world().config.spec)
        put(notifications, "_POLL_INTERVAL_S", 20.0)
        put(batch_main, "BufferedLogHandler", _NoLog)
        put(batch_main, "raise_fd_limit", lambda _: None)
        put(supervise, "kill_orphans", _kill_orphans)
        put(worker_group, "HeartbeatServer", HeartbeatServer)
        put(worker_group, "TICK_INTERVAL_S", _REQUESTS_INTERVAL_S)
        put(attempt_runner, "RendezvousStore", _Store)
        put(node_steps, "RendezvousStore", _Store)
        put(step_launchers, "address_of_this_host", lambda hosts: hosts[0])
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
    seed: int
    faults: tuple[Fault, ...]
    trace_hash: int
    outcome: str
    violation: str | None = None
    trace: tuple[str, ...] = ()
    num_events: int = 0


@functools.cache
def _own_root() -> Path:
    return _ROOT / f"hpctrain-simulation-{os.getpid():08d}"


def run_seed(seed: int, faults: Sequence[Fault] | None = None, *, record: bool = False) -> SeedResult:
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
    except Exception as error:  # noqa: BLE001 (any error is a finding)
        frames = traceback.extract_tb(error.__traceback__)
        place = next((frame for frame in reversed(frames) if "/hpctrain/" in frame.filename), frames[-1])
        where = f"{Path(place.filename).name}:{place.lineno}, {place.name}"
        violation = f"{type(error).__name__}: {error} ({where})"
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


def command_of(result: SeedResult) -> str:
    """Describe a failure, with the command that repeats it."""
    faults = "".join(f" --fault {fault}" for fault in result.faults) or " --fault none"
    command = f"make simulate SEEDS={result.seed} FAULTS='{faults.strip()}'"
    return f"seed {result.seed}: {result.violation}\n    {command}"


_entered = contextlib.ExitStack()


def _enter() -> None:
    cores = sorted(os.sched_getaffinity(0))
    # The threads hand over faster on one core.
    os.sched_setaffinity(0, {cores[multiprocessing.current_process()._identity[0] % len(cores)]})
    gc.freeze()
    _entered.enter_context(simulated_supervisor())


def _run_chunk(seeds: Sequence[int], deadline: float) -> tuple[int, Counter[str], list[str]]:
    events, outcomes, failures = 0, Counter[str](), []
    for seed in seeds if time.time() < deadline else ():
        result = run_seed(seed)
        events += result.num_events
        outcomes[result.outcome] += 1
        if result.violation is not None:
            failures.append(command_of(shrink(result)))
    return events, outcomes, failures


def _repeat(seed: int, names: Sequence[str] | None) -> int:
    faults = None if names is None else [Fault.parse(name) for name in names if name != "none"]
    out = sys.stdout
    with simulated_supervisor(log=True):
        result = run_seed(seed, faults, record=True)
    print(*result.trace, sep="\n", file=out)
    print(f"{result.outcome}: {result.violation or 'no violation'}", file=out)
    return 1 if result.violation else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0:10000", help="FIRST:LAST, or one seed, whose trace is printed")
    parser.add_argument("--fault", action="append", help="replaces the faults of one seed; none: no faults")
    parser.add_argument("--time", type=float, help="stop after this many seconds")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    first, _, last = args.seeds.partition(":")
    if not first.isdecimal() or (last and not (last.isdecimal() and int(last) > int(first))):
        parser.error(f"SEEDS (--seeds) is {args.seeds!r}, but must be FIRST:LAST (0:10000) or one seed.")
    if not last:
        return _repeat(int(first), args.fault)
    chunks = [range(i, min(i + 100, int(last))) for i in range(int(first), int(last), 100)]
    begun, num_events, num_failures, outcomes = time.time(), 0, 0, Counter[str]()
    deadlines = [begun + (args.time or math.inf)] * len(chunks)
    with ProcessPoolExecutor(args.processes, initializer=_enter) as pool:
        for events, some_outcomes, failures in pool.map(_run_chunk, chunks, deadlines):
            num_events += events
            outcomes += some_outcomes
            num_failures += len(failures)
            for failure in failures:
                print(failure, flush=True)
    num_seeds, seconds = outcomes.total(), time.time() - begun
    print(f"{num_seeds} seeds in {seconds:.0f} s, {num_events} events, {num_failures} failures")
    print(", ".join(f"{outcome}: {count}" for outcome, count in outcomes.most_common()))
    return 1 if num_failures else 0


if __name__ == "__main__":
    sys.exit(main())
