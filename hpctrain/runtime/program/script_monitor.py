"""Observe the progress of a script without the Trainer from outside its code.

A rank makes progress if it completes optimizer steps, prints, or is busy: its main thread changes position or
computes in native code. A rank that sleeps, or waits at one position for other ranks, makes no progress. A
kernel on a GPU that waits for other ranks appears as computation.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from types import FrameType

from hpctrain.cluster.processes import child_pids, stat_fields
from hpctrain.runtime.program.step_log import StepLog
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.unfinished_training import has_started

#: Samples per second. A sample takes about 50 µs, so sampling uses 0.05% of a core.
_SAMPLES_PER_S = 10
#: Maximum time of a sample; native code may hold the GIL for seconds.
_MAX_SAMPLE_S = 10.0
#: Fraction of a core below which processes are idle. Threads of trackers and data loaders wake up at times.
_IDLE_SHARE = 0.02
#: Seconds between two checks of CPU time and output.
_CHECK_EVERY_S = 1.0
#: Place of the nice value in the fields of /proc/PID/stat after the name (man 5 proc).
_NICE = 16

#: Modules in which a rank waits for other ranks, or for a device that waits.
_EXCHANGE = (
    *("torch.distributed", "torch.autograd", "torch.nn.parallel", "torch.cuda"),
    *("hpctrain.training.loop.step_sync", "hpctrain.runtime.distributed_context"),
    "hpctrain.checkpoint.io.coordination",
)
#: Modules that call data sets in the process of the rank, and in which it waits for its data workers.
_LOADER = ("torch.utils.data",)
_DATA = (*_LOADER, "multiprocessing", "queue")


class ScriptMonitor:
    """Samples the main thread, or the command with this pid, and updates `activity`."""

    def __init__(self, pid: int | None = None, step_log: StepLog | None = None) -> None:
        self._pid, self._step_log = pid, step_log
        self._main = threading.main_thread()
        self._stack: tuple[int, ...] = ()
        self._has_moved = self._is_joining = False
        self._checked_at, self._cpu_s, self._printed = time.monotonic(), 0.0, 0

    def start(self) -> None:
        """Sample in a thread until the process ends, or a `Trainer` or `session` takes over."""
        threading.Thread(target=self._run, name="hpctrain-monitor", daemon=True).start()

    def _run(self) -> None:
        sampled_at = time.monotonic()
        while not has_started():
            time.sleep(1 / _SAMPLES_PER_S)
            now = time.monotonic()
            # A longer time means that this process was suspended.
            elapsed_s = min(now - sampled_at, _MAX_SAMPLE_S)
            is_waiting = self._pid is None and self._sample(elapsed_s)
            sampled_at = now
            if now - self._checked_at >= _CHECK_EVERY_S:
                self._check(now, is_waiting=is_waiting)
                if self._step_log is not None:
                    self._step_log.write()

    def _sample(self, elapsed_s: float) -> bool:
        """Attribute the time since the last sample; return true if the main thread waits for other ranks."""
        frame = sys._current_frames().get(self._main.ident or 0)
        if frame is None:
            return False
        frames = list(outer_frames(frame))
        stack = tuple(position for frame in frames for position in (id(frame.f_code), frame.f_lasti))
        self._has_moved |= stack != self._stack
        self._stack = stack
        is_waiting = waits_for_ranks(frame) and _is_asleep(self._main.native_id)
        # torch polls the store, and prints warnings.
        self._is_joining = not activity.step and find_rendezvous(frame, os.environ) is not None
        if activity.step:
            if is_waiting:
                activity.exchange_s += elapsed_s
            elif _is_in(frame, _DATA) or any(_is_in(frame, _LOADER) for frame in frames):
                activity.data_s += elapsed_s
            else:
                activity.compute_s += elapsed_s
        return is_waiting

    def _check(self, now: float, *, is_waiting: bool) -> None:
        """Count progress if the rank was busy or printed since the last check."""
        cpu_s, printed = _cpu_seconds(self._pid), _output_size()
        busy = cpu_s - self._cpu_s >= _IDLE_SHARE * (now - self._checked_at)
        is_active = printed != self._printed or (busy and not is_waiting)
        if self._has_moved or (is_active and not self._is_joining):
            activity.progress_count += 1
        self._has_moved, self._checked_at, self._cpu_s, self._printed = False, now, cpu_s, printed


def waits_for_ranks(frame: FrameType) -> bool:
    return _is_in(frame, _EXCHANGE)


def find_rendezvous(frame: FrameType | None, environ: Mapping[str, str]) -> str | None:
    """Return the address at which a thread waits for the process group; None if it does not wait for it."""
    for outer in outer_frames(frame):
        module = outer.f_globals.get("__name__")
        if outer.f_code.co_name == "init_process_group" and module == "torch.distributed.distributed_c10d":
            method = outer.f_locals.get("init_method") or "env://"
            if outer.f_locals.get("store") is not None:
                return "the store of the script"
            if str(method).startswith("env://"):
                return f"{environ.get('MASTER_ADDR')}:{environ.get('MASTER_PORT')}"
            return str(method)
    return None


def outer_frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_in(frame: FrameType, packages: tuple[str, ...]) -> bool:
    module = str(frame.f_globals.get("__name__"))
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _is_asleep(thread: int | None) -> bool:
    """True if the thread of the operating system sleeps, or if this is unknown."""
    with suppress(OSError):
        return stat_fields(f"self/task/{thread}")[0] == "S"
    return True


def _cpu_seconds(pid: int | None) -> float:
    """Return the CPU time of this process, or of `pid`, and of its descendants.

    Descendants with a lower priority are background work: on a busy node, telemetry takes minutes to start.
    """
    total = time.process_time() if pid is None else 0.0
    own_nice = os.nice(0)
    pending = child_pids(os.getpid()) if pid is None else [pid]
    while pending:
        pid = pending.pop()
        with suppress(OSError, IndexError):
            fields = stat_fields(pid)
            if int(fields[_NICE]) > own_nice:
                continue
            # utime, stime, and those of children that were waited for, in clock ticks (man 5 proc).
            total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            pending += child_pids(pid)
    return total


def _output_size() -> int:
    with suppress(OSError):
        return os.fstat(1).st_size
    return 0
