"""Write one failure file per failed rank, with the error, its location and its order among the failures."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hpctrain.cluster.addresses import host_name
from hpctrain.errors import DataWorkerKilled, DiskFull, SilentCorruption, UserError
from hpctrain.files import make_folder, write_atomic
from hpctrain.records.crash_output import fold, is_peer_lost
from hpctrain.rundir import ATTEMPT_VARIABLE
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.snapshot_imports import describe_missing_copy
from hpctrain.text import signal_name

#: Keys in the attempt's store: the number of failures, which orders them without a common clock, and the
#: first failure that is not a consequence of another failure.
FAILURE_COUNT_KEY = "hpctrain/failures"
_CAUSE_KEY = "hpctrain/cause"
#: Messages of programs that refuse to overwrite output.
_REFUSES_OUTPUT = re.compile(
    r"already exist|file exists|to not exist|(directory|folder) (is )?not empty", re.IGNORECASE
)
_STORE_TIMEOUT = timedelta(seconds=2)
#: Marks an exception that would recur in every attempt.
_FINAL = "_hpctrain_final"
#: torch's report of a killed data worker, which its signal handler raises at any point of the main thread.
_KILLED_WORKER = re.compile(
    r"DataLoader worker \(pid (?P<pid>\d+)\) is killed by signal: (?P<signal>[^.]+)\."
)
_SIGNALS = {signal.strsignal(number): number for number in signal.Signals}
_LOADER_FILE = "torch/utils/data/dataloader.py"
#: Time limit for the exit code of a data worker whose connection is closed.
_EXIT_TIMEOUT_S = 1.0
_MICRO_BATCH_SIZE = "_hpctrain_micro_batch_size"


def mark_non_retryable(error: BaseException) -> None:
    """Mark `error` as final: if it is the cause, the run ends without another attempt."""
    setattr(error, _FINAL, True)


def suggest_micro_batch_size(error: BaseException, size: int) -> None:
    """Attach a smaller size of micro-batches for the next attempt to an error of GPU memory."""
    setattr(error, _MICRO_BATCH_SIZE, size)


def failure_record(error: BaseException, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return a record of `error` for `write_failure`, without references to the exception's objects."""
    return _record(name_killed_worker(error), environ)


def _record(error: BaseException, environ: Mapping[str, str]) -> dict[str, Any]:
    if hint := describe_missing_copy(error, environ) or _describe_earlier_output(error, environ):
        error.add_note(f"{hint}.")
    record = {
        "kind": "exception",
        "error": type(error).__name__,
        "classes": [base.__name__ for base in type(error).__mro__],
        "message": f"{_message(error)}: {hint}" if hint else _message(error),
        # A full disk is not a fault of the code, so no traceback is needed.
        "traceback": "" if isinstance(error, DiskFull) else _traceback(error),
        # An invalid request of the user fails in every attempt.
        "final": getattr(error, _FINAL, False) or isinstance(error, UserError),
        "micro_batch_size": getattr(error, _MICRO_BATCH_SIZE, None),
        "has_trained": activity.step > 0,
    }
    if isinstance(error, SilentCorruption):
        suspects = [[suspect.rank, suspect.device] for suspect in error.suspects]
        record["corruption"] = {"suspects": suspects, "verified_step": error.verified_step}
    return record


def _message(error: BaseException) -> str:
    """Return the message; of a traceback that torch's `mp.spawn` passes on, its last line."""
    lines = str(error).strip().splitlines()
    if type(error).__name__ != "ProcessRaisedException" or not lines:
        return str(error)
    return f"process {getattr(error, 'error_index', '?')}: {lines[-1]}"


def _describe_earlier_output(error: BaseException, environ: Mapping[str, str]) -> str | None:
    """Return advice for a program that refuses the output of its own earlier attempt; None otherwise."""
    refuses = isinstance(error, FileExistsError) or _REFUSES_OUTPUT.search(str(error))
    if not refuses or environ.get(ATTEMPT_VARIABLE, "0") == "0":
        return None
    return (
        "The output may be that of an earlier attempt of the run. Change the script to continue from its "
        "earlier output, or to overwrite it"
    )


def print_failure(path: Path, error: BaseException, log: Path, environ: Mapping[str, str]) -> None:
    """Print the traceback, or only the cause if a peer was lost, and write the failure file. Never raises."""
    with no_death_handler():
        error = name_killed_worker(error)
        record = _record(error, environ)
        is_consequence = is_peer_lost(str(error), record["classes"])
        if not is_consequence:
            print(fold(_traceback(error)), end="", file=sys.stderr)
        cause = write_failure(path, record, log, environ)
        if is_consequence:
            reason = f"exited because {cause}" if cause else "lost the connection to another rank"
            message = " ".join(str(error).split())
            print(f"hpctrain: this rank {reason}: {type(error).__name__}: {message}", file=sys.stderr)


def write_failure(
    path: Path, failure: Mapping[str, Any], log: Path, environ: Mapping[str, str]
) -> str | None:
    """Write a failure file before peers can detect the loss, and return the cause, if known. Never raises."""
    order, cause = _next_failure_index(failure, environ)
    record = {
        "time": time.time(),
        "order": order,
        "rank": int(environ["RANK"]),
        "host": socket.gethostname(),
        "node": environ.get("SLURMD_NODENAME"),
        **failure,
        "log": str(log),
    }
    try:
        make_folder(path.parent)
        write_atomic(path, json.dumps(record, indent=1) + "\n")
    except OSError as problem:
        print(f"hpctrain: cannot write the failure file {path}: {problem}", file=sys.stderr)
    return cause


def name_killed_worker(error: BaseException) -> BaseException:
    """Return an error that names the killed worker of a torch DataLoader if `error` is its consequence."""
    with no_death_handler():
        if match := _KILLED_WORKER.search(str(error)):
            pid, number = int(match["pid"]), int(_SIGNALS.get(match["signal"], signal.SIGKILL))
        else:
            worker = wait_for_dead_worker(error, _loader_workers(error))
            if worker is None or worker.exitcode is None or worker.exitcode > 0:
                return error
            pid, number = worker.pid or 0, -worker.exitcode
    named = DataWorkerKilled(f"Data worker (pid {pid})", signal_name(number))
    named.__cause__ = error
    return named


@contextmanager
def no_death_handler() -> Iterator[None]:
    """Disable torch's SIGCHLD handler, which raises anywhere in the main thread if a worker is killed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        # Python cannot restore a handler that C code has installed.
        signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def wait_for_dead_worker(error: BaseException, workers: Collection[BaseProcess]) -> BaseProcess | None:
    """Return the data worker whose death caused `error`, if any."""
    is_of_data_set = str(error).startswith("Caught ")
    # A dying process closes its connections before its exit code is available.
    deadline = time.monotonic() + (_EXIT_TIMEOUT_S if isinstance(error, OSError | EOFError) else 0.0)
    while workers and not is_of_data_set:
        if dead := [worker for worker in workers if worker.exitcode not in (None, 0)]:
            return dead[0]
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    return None


def _loader_workers(error: BaseException) -> list[BaseProcess]:
    if not isinstance(error, OSError | EOFError | RuntimeError):
        return []
    iterators = (
        frame.f_locals.get("self")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename.endswith(_LOADER_FILE)
    )
    return [worker for iterator in iterators for worker in getattr(iterator, "_workers", ())]


def _traceback(error: BaseException) -> str:
    """Return the traceback without hpctrain's frames before the user's first frame."""
    package = str(Path(__file__).parents[1])
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((package, "<frozen runpy>")):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _next_failure_index(
    failure: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[int | None, str | None]:
    """Return the number of this failure in the attempt, and the cause of all; None without a store."""
    # A rank that never imported torch has no peers that could fail as a consequence.
    if "torch" not in sys.modules:
        return None, None
    order = None
    try:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        address, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        # Rank 0 may have exited, or the script may use another store. torch would try until its timeout.
        socket.create_connection((address, port), _STORE_TIMEOUT.total_seconds()).close()
        store = TCPStore(address, port, is_master=False, timeout=_STORE_TIMEOUT, wait_for_workers=False)
        order = int(store.add(FAILURE_COUNT_KEY, 1))
        if not is_peer_lost(failure["message"], failure.get("classes", ())):
            host = host_name(environ)
            store.compare_set(_CAUSE_KEY, "", f"rank {environ['RANK']} on {host} failed ({failure['error']})")
        return order, store.get(_CAUSE_KEY).decode() if store.check([_CAUSE_KEY]) else None
    except Exception:  # noqa: BLE001 (the failure file is written in any case)
        return order, None
