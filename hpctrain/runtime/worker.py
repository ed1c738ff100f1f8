"""Run a program as a rank: `python -P -m hpctrain.runtime.worker [ENVIRONMENT] '[KIND, PROGRAM, ARG, ...]'`.

The process detects its rank, writes its output to the rank's log, and runs the user's program with the
variables that `env://` and torchrun scripts expect. It does not import torch. The program and its arguments
are one JSON word, because srun interprets some words, such as a single `:`.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.cluster import ENVIRONMENT_VARIABLE, Ranks, detect
from hpctrain.cluster.device_plan import gpus_per_task, own_gpu_variables
from hpctrain.cluster.kill_orphans import kill_orphans
from hpctrain.cluster.processes import die_with_parent, die_with_supervisor, title_writer
from hpctrain.errors import EXIT_CONTINUE, DiskFull, Unauthenticated
from hpctrain.files import make_folder, own_file
from hpctrain.records.buffered_writer import make_stdio_lossy
from hpctrain.records.log_tail import read_last_lines
from hpctrain.rundir import (
    HISTORY_VARIABLES,
    STANDBY_VARIABLE,
    SUPERVISOR_ADDRESS_VARIABLE,
    RunDir,
    attempt_of,
)
from hpctrain.runtime.cpu_binding import bind_cpus
from hpctrain.runtime.failure_file import failure_record, print_failure, write_failure
from hpctrain.runtime.program.compile_cache import compile_cache
from hpctrain.runtime.program.process_observer import ChildRelay, ProcessObserver
from hpctrain.runtime.program.program import CommandFailed, Program
from hpctrain.runtime.program.step_hook import install_step_hook
from hpctrain.runtime.release_devices import drain_gloo_threads, release_devices_within
from hpctrain.runtime.sidecar import Sidecar, start_node_sampler
from hpctrain.runtime.snapshot_imports import redirect_imports
from hpctrain.runtime.stopping.agreed_stop import agreed_stop
from hpctrain.runtime.stopping.signal_recorder import (
    is_failure_part_of_stop,
    pending_stop_signal,
    start_signal_recorder,
    wait_for_stop_signal,
)
from hpctrain.runtime.stopping.stop_signals import (
    exit_on_stop_signal,
    ignore_signals_at_exit,
    is_exiting,
    leave_in_time,
    release_limit_s,
)
from hpctrain.runtime.supervisor_connection import SupervisorConnection
from hpctrain.runtime.unfinished_training import find_unfinished_training, has_stopped, pending_saves
from hpctrain.telemetry.sampling.nvml import count_gpus
from hpctrain.telemetry.startup_parts import StartupPart, startup_times

#: Lines of the log in which the cause of an exit is searched.
_LAST_LINES = 5
#: Maximum seconds between the stop signals that Slurm sends to the processes of a step.
_LATE_SIGNAL_TIMEOUT_S = 2.0
_LOG_INDEX_INTERVAL_S = 1.0
#: Time limit for the last line of the node's measurements, unless the file system hangs.
_LAST_MEASUREMENT_S = 1.0


def main(argv: list[str]) -> NoReturn:
    startup_times.end(StartupPart.INTERPRETER)
    *environment, program_json = argv
    ignore_signals_at_exit()
    exit_on_stop_signal()
    start_signal_recorder(leave_in_time)
    die_with_supervisor(os.environ)
    if environment:
        # A killed agent cannot end its ranks.
        die_with_parent()
    run, attempt = attempt_of(os.environ)
    show_title, program_name = title_writer(program_json), Path(json.loads(program_json)[1]).name
    if STANDBY_VARIABLE in os.environ:
        show_title(f"standby worker: {program_name}")
    source = environment[0] if environment else "slurm"
    ranks, printed, connect = _join_attempt(source, attempt, program_json)
    title = f"rank {ranks.rank} of {ranks.world_size}: {program_name}"
    show_title(title)
    os.register_at_fork(after_in_child=partial(show_title, f"child of {title}"))
    _redirect_output(run.rank_log(attempt, ranks.rank), printed)
    start_log_index(run.log_index(attempt, ranks.node_rank), ranks.rank)
    if ranks.local_rank == 0:
        kill_orphans(str(run.path), attempt)
    rank_end = _RankEnd(run, attempt, ranks, start_node_sampler(run, ranks, os.environ))
    # The sampler, which has already started, measures all GPUs of the node.
    if gpus_per_task(os.environ) > 1:
        os.environ.update(own_gpu_variables(ranks, os.environ, count_gpus(os.environ)))
    faulthandler.enable()
    # For ranks that cannot respond to the supervisor because native code holds the GIL.
    faulthandler.register(signal.SIGQUIT)
    redirect_imports(os.environ)
    program = _resolve_program(program_json)
    observer = ProcessObserver(run, attempt, ranks, os.environ, records_steps=ranks.is_main)
    install_step_hook(observer.after_step, is_restart=attempt > 0)
    compile_cache.install(run, ranks, os.environ)
    relay = None
    if connect is not None:
        agreed_stop.is_enabled = True
        if program.kind == "command" and sys.platform == "linux":
            relay = ChildRelay(observer)
        (relay or observer).start(connect)
    # After the heartbeats, because a faulty driver may not answer.
    if (message := bind_cpus(ranks, os.environ)) is not None:
        print(f"hpctrain: {message}", flush=True)
    argument: object = None
    startup_times.end(StartupPart.WORKER)
    try:
        program.run(relay)
        observer.check_end()
    except CommandFailed as failed:
        # Slurm may signal the command, or other ranks, before this process.
        wait_for_stop_signal(_LATE_SIGNAL_TIMEOUT_S)
        rank_end.exit_now(EXIT_CONTINUE if is_failure_part_of_stop(os.environ) else _exit_code(failed.code))
    except SystemExit as exit_request:
        argument = exit_request.code
    except BaseException as error:  # noqa: BLE001 (the rank reports the error and exits)
        rank_end.fail(error)
    rank_end.exit_with(argument)


def _resolve_program(program_json: str) -> Program:
    kind, entry, *args = json.loads(program_json)
    return Program.resolve(kind, entry, args)


def _join_attempt(
    source: str, attempt: int, program_json: str
) -> tuple[Ranks, bytes, Callable[[], SupervisorConnection] | None]:
    """Return the ranks, the output so far, and a function that connects to the supervisor, if any."""
    # srun and the local launcher set Slurm's variables. Values from an outer torchrun or the user's shell
    # must not turn a rank into a single process.
    os.environ.pop(ENVIRONMENT_VARIABLE, None)
    ranks = _detect_ranks(source)
    address, modules = (
        os.environ.pop(name, None) for name in (SUPERVISOR_ADDRESS_VARIABLE, STANDBY_VARIABLE)
    )
    if address is None:
        return ranks, b"", None
    connect = partial(SupervisorConnection, address, ranks, attempt)
    if modules is None:
        return ranks, b"", connect
    connection = connect()
    import_folder = _resolve_program(program_json).import_folder
    variables, printed = _wait_for_start(connection, json.loads(modules), import_folder)
    for name in HISTORY_VARIABLES:  # they may no longer apply
        os.environ.pop(name, None)
    os.environ.update(variables)
    # The connection that is already open; a new connection if it is lost.
    connections = chain([connection], iter(connect, None))
    return _detect_ranks(source), printed, partial(next, connections)


def _wait_for_start(
    connection: SupervisorConnection, modules: list[str], import_folder: str
) -> tuple[dict[str, str], bytes]:
    """Import `modules` as for a program in `import_folder`, and wait for the start message, or exit.

    Early imports are equivalent unless the script changes environment variables before its own imports. In
    this case, the rank reports the variables, and no standby workers are started.

    Returns the variables that were unknown when the process was started, and the output of the imports.
    """
    with tempfile.TemporaryFile() as printed:
        launcher_fds = [os.dup(fd) for fd in (1, 2)]
        for fd in (1, 2):
            os.dup2(printed.fileno(), fd)
        try:
            _import(modules, import_folder)
        except Exception as error:  # noqa: BLE001 (the script will raise the error again)
            with suppress(OSError):
                connection.send({"ready": False, "why": f"{type(error).__name__}: {error}"})
            os._exit(0)
        try:
            connection.send({"ready": True})
            while (message := connection.receive()) is None or "go" not in message:
                pass
        except (OSError, ValueError, Unauthenticated):
            os._exit(0)
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, launcher_fd in zip((1, 2), launcher_fds, strict=True):
            os.dup2(launcher_fd, fd)
            os.close(launcher_fd)
        printed.seek(0)
        return message["go"], printed.read()


def _import(modules: list[str], import_folder: str) -> None:
    search_path = list(sys.path)
    redirect_imports(os.environ)
    sys.path.insert(0, import_folder)
    for name in modules:
        importlib.import_module(name)
    sys.path[:] = search_path


class _RankEnd:
    """Ends the rank, after writing a failure file if the run is neither complete nor stopped."""

    def __init__(self, run: RunDir, attempt: int, ranks: Ranks, sampler: Sidecar | None) -> None:
        self._log, self._failure_file = run.rank_log(attempt, ranks.rank), run.failure(attempt, ranks.rank)
        self._is_main, self._sampler = ranks.is_main, sampler

    def fail(self, error: BaseException) -> NoReturn:
        if is_exiting() or has_stopped():
            traceback.print_exception(error)
            self.exit_now(EXIT_CONTINUE)
        if not isinstance(error, DiskFull):
            print_failure(self._failure_file, error, self._log, os.environ)
        else:
            if self._is_main:  # The message is the same on all ranks.
                print(f"hpctrain: {error}.", file=sys.stderr)
            self._write_failure(failure_record(error, os.environ))
        self.exit_now(1)

    def exit_with(self, argument: object) -> NoReturn:
        """Exit after the program has ended, or has called `sys.exit(argument)`."""
        code = _exit_code(argument)
        if has_stopped() or (code != 0 and is_exiting()):
            # The state is saved, regardless of the script's handling of the exception.
            code = EXIT_CONTINUE
        if code == EXIT_CONTINUE:
            for wait in pending_saves:
                try:
                    wait()
                except Exception as error:  # noqa: BLE001 (the run continues from an earlier checkpoint)
                    print(f"hpctrain: {error}", file=sys.stderr)
            self.exit_now(code)
        if code == 0 and (failure := find_unfinished_training()) is not None:
            print(f"hpctrain: {failure['error']}: {failure['message']}.", file=sys.stderr)
            self._write_failure(failure)
            self.exit_now(1)
        if (stop := pending_stop_signal()) and (code == 0 or is_failure_part_of_stop(os.environ)):
            # Exit code 0 may mean complete or stopped; a complete script exits immediately when restarted.
            print(
                f"hpctrain: the script exited with code {code} after {stop.name}, which counts as a stop, "
                "not as the end of the run."
            )
            self._exit_normally(EXIT_CONTINUE)
        if code != 0:
            cause = f"the script called sys.exit({argument!r})"
            lines = [line for line in read_last_lines(self._log, _LAST_LINES) if line.strip()]
            if lines and not isinstance(argument, str):
                cause += f" after the output {lines[-1].strip()!r}"
            # Without a traceback, `logs --errors` shows the end of the log.
            self._write_failure({**failure_record(RuntimeError(cause), os.environ), "traceback": ""})
            self.exit_now(code)
        self._exit_normally(0)

    def exit_now(self, code: int) -> NoReturn:
        """Exit without the interpreter's clean-up, which may wait for unresponsive peers."""
        if code == EXIT_CONTINUE:
            release_devices_within(release_limit_s())
        self._stop_sampler()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _exit_normally(self, code: int) -> NoReturn:
        self._stop_sampler()
        drain_gloo_threads()
        sys.exit(code)

    def _stop_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.stop(_LAST_MEASUREMENT_S)

    def _write_failure(self, failure: Mapping[str, Any]) -> None:
        write_failure(self._failure_file, failure, self._log, os.environ)


def _detect_ranks(source: str) -> Ranks:
    ranks = detect({**os.environ, ENVIRONMENT_VARIABLE: source})
    os.environ.update(ranks.torch_variables())
    return ranks


def _redirect_output(log: Path, printed: bytes) -> None:
    """Append stdout and stderr, also of native code, to `log` line by line, after `printed`."""
    try:
        make_folder(log.parent)
        fd = own_file(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    except OSError as error:
        make_stdio_lossy()
        print(
            f"hpctrain: cannot open {log}: {error.strerror}. The output of this rank goes to the launcher's "
            "log instead."
        )
        return
    with suppress(OSError):
        os.write(fd, printed)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    make_stdio_lossy()


def start_log_index(path: Path, rank: int) -> None:
    """Record the length of this rank's log over time, for merging the logs of all ranks; ignore errors."""
    try:
        fd = own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    except OSError:
        return
    log = os.dup(1)

    def record_lengths() -> None:
        recorded = 0
        while True:
            time.sleep(_LOG_INDEX_INTERVAL_S)
            if (size := os.fstat(log).st_size) == recorded:
                continue
            record = {"time": round(time.time(), 2), "rank": rank, "bytes": size}
            try:
                # The ranks of a node share the file; lines of separate writes could mix.
                os.write(fd, (json.dumps(record) + "\n").encode("ascii"))
            except OSError:
                return
            recorded = size

    threading.Thread(target=record_lengths, name="hpctrain-log-times", daemon=True).start()


def _exit_code(code: object) -> int:
    """Return the exit code of `sys.exit(code)`; a string is printed, as in Python."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main(sys.argv[1:])
