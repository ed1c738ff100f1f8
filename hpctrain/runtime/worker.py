"""Run a program as a rank: `python -P -m hpctrain.runtime.worker [ENVIRONMENT] '[KIND, PROGRAM, ARG, ...]'`.

The process detects its rank, writes its output to the rank's log, and runs the user's program with the
variables that `env://` and torchrun scripts expect. It does not import torch. The program and its arguments
are one JSON word, because srun interprets some words, such as a single `:`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from hpctrain.buffered_writer import make_stdio_lossy
from hpctrain.cluster import ENVIRONMENT_VARIABLE, Ranks, detect
from hpctrain.cluster.device_plan import gpus_per_task, own_gpu_variables
from hpctrain.cluster.processes import die_with_parent, die_with_supervisor, kill_orphans, title_writer
from hpctrain.errors import EXIT_CONTINUE, DiskFull
from hpctrain.files import make_folder, own_file
from hpctrain.records.log_tail import read_last_lines
from hpctrain.rundir import (
    ATTEMPT_VARIABLE,
    HISTORY_VARIABLES,
    RUN_DIR_VARIABLE,
    STANDBY_VARIABLE,
    SUPERVISOR_ADDRESS_VARIABLE,
    RunDir,
)
from hpctrain.runtime.cpu_binding import bind_cpus
from hpctrain.runtime.failure_file import failure_record, print_failure, write_failure
from hpctrain.runtime.gloo_shutdown import drain_gloo_threads
from hpctrain.runtime.program.child_relay import ChildRelay
from hpctrain.runtime.program.heartbeat import (
    heartbeat_message,
    on_heartbeat_sent,
    on_message,
    wait_until_group_is_reported,
)
from hpctrain.runtime.program.process_group_check import ProcessGroupCheck
from hpctrain.runtime.program.program import CommandFailed, Program
from hpctrain.runtime.program.script_monitor import ScriptMonitor
from hpctrain.runtime.program.step_hook import install_step_hook
from hpctrain.runtime.program.step_log import StepLog
from hpctrain.runtime.sidecar import NodeSampler
from hpctrain.runtime.snapshot_imports import redirect_imports
from hpctrain.runtime.standby import wait_for_start
from hpctrain.runtime.stopping.agreed_stop import agreed_stop
from hpctrain.runtime.stopping.signal_recorder import (
    is_failure_part_of_stop,
    pending_stop_signal,
    start_signal_recorder,
    wait_for_stop_signal,
)
from hpctrain.runtime.stopping.stop_signals import (
    exit_after_step,
    exit_on_stop_signal,
    ignore_signals_at_exit,
    is_exiting,
)
from hpctrain.runtime.supervisor_connection import (
    Connection,
    Message,
    SupervisorConnection,
    start_heartbeat,
)
from hpctrain.runtime.unfinished_training import find_unfinished_training, has_stopped, pending_saves
from hpctrain.telemetry.sampling.nvml import count_gpus
from hpctrain.telemetry.startup_parts import StartupPart, startup_times

#: Lines of the log in which the cause of an exit is searched.
_LAST_LINES = 5
#: Maximum seconds between the stop signals that Slurm sends to the processes of a step.
_LATE_SIGNAL_TIMEOUT_S = 2.0
_LOG_INDEX_INTERVAL_S = 1.0


def main(argv: list[str]) -> NoReturn:
    startup_times.end(StartupPart.INTERPRETER)
    *environment, program_json = argv
    ignore_signals_at_exit()
    exit_on_stop_signal()
    start_signal_recorder()
    die_with_supervisor(os.environ)
    if environment:
        # A killed agent cannot end its ranks.
        die_with_parent()
    run, attempt = RunDir(Path(os.environ[RUN_DIR_VARIABLE])), int(os.environ[ATTEMPT_VARIABLE])
    show_title, program_name = title_writer(program_json), Path(json.loads(program_json)[1]).name
    if STANDBY_VARIABLE in os.environ:
        show_title(f"standby worker: {program_name}")
    source = environment[0] if environment else "slurm"
    ranks, printed, connect = _join_attempt(source, attempt, program_json)
    title = f"rank {ranks.rank} of {ranks.world_size}: {program_name}"
    show_title(title)
    os.register_at_fork(after_in_child=partial(show_title, f"child of {title}"))
    log, failure_file = run.rank_log(attempt, ranks.rank), run.failure(attempt, ranks.rank)
    _redirect_output(log, printed)
    start_log_index(run.log_index(attempt, ranks.node_rank), ranks.rank)
    if ranks.local_rank == 0:
        kill_orphans(os.environ[RUN_DIR_VARIABLE], attempt)
    sampler = NodeSampler(run, ranks, os.environ)
    # The sampler, which has already started, measures all GPUs of the node.
    if gpus_per_task(os.environ) > 1:
        os.environ.update(own_gpu_variables(ranks, os.environ, count_gpus(os.environ)))
    faulthandler.enable()
    # For ranks that cannot respond to the supervisor because native code holds the GIL.
    faulthandler.register(signal.SIGQUIT)
    redirect_imports(os.environ)
    program = _resolve_program(program_json)
    group_check = ProcessGroupCheck(os.environ)
    step_log = StepLog(run, attempt) if ranks.is_main else None
    if step_log is not None:
        step_log.write_at_exit()
    install_step_hook(partial(after_step, group_check), is_restart=attempt > 0)
    relay = None if connect is None else _start_heartbeat(connect, program, run, attempt, ranks, step_log)
    # After the heartbeats, because a faulty driver may not answer.
    if (binding := bind_cpus(ranks, os.environ)) is not None:
        print(f"hpctrain: {binding.message}", flush=True)
    argument: object = None
    startup_times.end(StartupPart.WORKER)
    try:
        program.run(relay)
        group_check.check_end()
    except CommandFailed as failed:
        # Slurm may signal the command, or other ranks, before this process.
        wait_for_stop_signal(_LATE_SIGNAL_TIMEOUT_S)
        _exit_now(EXIT_CONTINUE if is_failure_part_of_stop(os.environ) else _exit_code(failed.code), sampler)
    except SystemExit as exit_request:
        argument = exit_request.code
    except BaseException as error:  # noqa: BLE001 (the rank reports the error and exits)
        if is_exiting() or has_stopped():
            traceback.print_exception(error)
            _exit_now(EXIT_CONTINUE, sampler)
        if not isinstance(error, DiskFull):
            print_failure(failure_file, error, log, os.environ)
        else:
            if ranks.is_main:  # The message is the same on all ranks.
                print(f"hpctrain: {error}.", file=sys.stderr)
            write_failure(failure_file, failure_record(error, os.environ), log, os.environ)
        _exit_now(1, sampler)
    _exit_with(argument, sampler, log, lambda failure: write_failure(failure_file, failure, log, os.environ))


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
    variables, printed = wait_for_start(connection, json.loads(modules), import_folder)
    for name in HISTORY_VARIABLES:  # they may no longer apply
        os.environ.pop(name, None)
    os.environ.update(variables)
    # The connection that is already open; a new connection if it is lost.
    connections = chain([connection], iter(connect, None))
    return _detect_ranks(source), printed, partial(next, connections)


def _start_heartbeat(
    connect: Callable[[], Connection],
    program: Program,
    run: RunDir,
    attempt: int,
    ranks: Ranks,
    step_log: StepLog | None,
) -> ChildRelay | None:
    """Start to report to the supervisor; return the relay for the processes of a command."""
    agreed_stop.is_enabled = True
    heartbeat: Callable[[], Message] = partial(heartbeat_message, dict(os.environ))
    handle: Callable[[Connection, Message], None] = partial(on_message, run, attempt, ranks)
    relay = None
    if program.kind != "command":
        ScriptMonitor(step_log=step_log).start()
    elif sys.platform == "linux":
        relay = ChildRelay(ranks, heartbeat, handle)
        heartbeat, handle = relay.heartbeat_message, relay.on_message
    start_heartbeat(connect, heartbeat, handle, on_heartbeat_sent)
    return relay


def _exit_with(
    argument: object, sampler: NodeSampler, log: Path, write: Callable[[dict[str, Any]], object]
) -> NoReturn:
    """Exit after the program has ended, or has called `sys.exit(argument)`; `write` records a failure."""
    code = _exit_code(argument)
    if has_stopped() or (code != 0 and is_exiting()):
        # The state is saved, regardless of the script's handling of the exception.
        code = EXIT_CONTINUE
    if code == EXIT_CONTINUE:
        for wait in pending_saves:
            try:
                wait()
            except Exception as error:  # noqa: BLE001 (reported; the run continues from an earlier checkpoint)
                print(f"hpctrain: {error}", file=sys.stderr)
        _exit_now(code, sampler)
    if code == 0 and (failure := find_unfinished_training()) is not None:
        print(f"hpctrain: {failure['error']}: {failure['message']}.", file=sys.stderr)
        write(failure)
        _exit_now(1, sampler)
    if (stop := pending_stop_signal()) and (code == 0 or is_failure_part_of_stop(os.environ)):
        # Exit code 0 may mean complete or stopped; a complete script exits immediately when restarted.
        print(
            f"hpctrain: the script exited with code {code} after {stop.name}, which counts as a stop, not as "
            "the end of the run."
        )
        _exit_normally(EXIT_CONTINUE, sampler)
    if code != 0:
        cause = f"the script called sys.exit({argument!r})"
        lines = [line for line in read_last_lines(log, _LAST_LINES) if line.strip()]
        if lines and not isinstance(argument, str):
            cause += f" after the output {lines[-1].strip()!r}"
        # Without a traceback, `logs --errors` shows the end of the log.
        write({**failure_record(RuntimeError(cause), os.environ), "traceback": ""})
        _exit_now(code, sampler)
    wait_until_group_is_reported()
    _exit_normally(0, sampler)


def after_step(group_check: ProcessGroupCheck) -> None:
    group_check.after_step()
    exit_after_step()


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
    """Record the length of this rank's log over time, for merging the logs of all ranks; ignore errors.

    The ranks of a node share a record file that remains open: on a shared file system, opening and closing
    are slower than writing a line.
    """
    try:
        fd = own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    except OSError:
        return
    log = os.dup(1)
    threading.Thread(
        target=_record_lengths, args=(fd, log, rank), name="hpctrain-log-times", daemon=True
    ).start()


def _record_lengths(fd: int, log: int, rank: int) -> None:
    recorded = 0
    while True:
        time.sleep(_LOG_INDEX_INTERVAL_S)
        if (size := os.fstat(log).st_size) == recorded:
            continue
        record = {"time": round(time.time(), 2), "rank": rank, "bytes": size}
        try:
            # A single write, so that the ranks of a node do not mix lines.
            os.write(fd, (json.dumps(record) + "\n").encode("ascii"))
        except OSError:
            return
        recorded = size


def _exit_code(code: object) -> int:
    """Return the exit code of `sys.exit(code)`; a string is printed, as in Python."""
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


def _exit_normally(code: int, sampler: NodeSampler) -> NoReturn:
    sampler.stop()
    drain_gloo_threads()
    sys.exit(code)


def _exit_now(code: int, sampler: NodeSampler) -> NoReturn:
    """Exit without the interpreter's clean-up, which may wait for unresponsive peers."""
    sampler.stop()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
