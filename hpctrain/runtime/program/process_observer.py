"""Observe the processes of a rank: its worker, or the Python processes of a command such as a shell script.

A process of a command reports like a rank, but to the worker, over a socket that only processes of the same
user can open. The worker sends the messages of one of them to the supervisor: the first that completes
optimizer steps, or else the first that imported torch. Without such a process, the worker reports on itself.
"""

from __future__ import annotations

import faulthandler
import json
import os
import secrets
import signal
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any

from hpctrain.cluster import Ranks, detect, expand_hostlist
from hpctrain.cluster.addresses import host_name
from hpctrain.cluster.detection import detect_local
from hpctrain.errors import EnvironmentMismatch, UserError
from hpctrain.jobspec.launcher import RANK_LAUNCHERS, observing_variables
from hpctrain.rundir import (
    ATTEMPT_VARIABLE,
    CHILD_VARIABLE,
    INDEPENDENT_RANKS_VARIABLE,
    SUPERVISOR_ADDRESS_VARIABLE,
    RunDir,
    attempt_of,
)
from hpctrain.runtime.exit_hooks import call_at_exit
from hpctrain.runtime.failure_file import failure_record, write_failure
from hpctrain.runtime.program import heartbeat
from hpctrain.runtime.program.compile_cache import compile_cache
from hpctrain.runtime.program.script_monitor import ScriptMonitor
from hpctrain.runtime.program.step_hook import install_step_hook
from hpctrain.runtime.program.step_log import StepLog
from hpctrain.runtime.rank_activity import activity, has_process_group
from hpctrain.runtime.sidecar import Sidecar, start_node_sampler
from hpctrain.runtime.stopping.agreed_stop import agreed_stop
from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS, start_signal_recorder
from hpctrain.runtime.stopping.stop_signals import (
    exit_after_step,
    exit_on_stop_signal,
    is_exiting,
    leave_in_time,
)
from hpctrain.runtime.supervisor_connection import (
    Connection,
    Message,
    SupervisorConnection,
    announce_exit,
    start_heartbeat,
)

#: struct ucred of unix(7): pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")
#: Seconds without a message after which the worker does not speak for a process, which sends one each second.
_SILENT_S = 10.0
#: Variables that a launcher inside of the command, such as torchrun, sets for each of its processes.
_LAUNCH_VARIABLES = (
    *("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK"),
    *("SLURM_STEP_ID", "SLURM_PROCID"),
)
#: Value of `INDEPENDENT_RANKS_VARIABLE` with which a rank that trains alone is noted, and continues.
_NOTED = "noted"
#: Optimizer steps without a process group after which a rank fails.
MAX_STEPS_ALONE = 20

#: Remedies for frameworks that silently train on a single rank, by module.
_ADVICE = {
    "lightning.pytorch": "Pass devices and num_nodes to Lightning's Trainer",
    "pytorch_lightning": "Pass devices and num_nodes to Lightning's Trainer",
    "accelerate": "If the nodes have no GPUs, set ACCELERATE_USE_CPU=true or pass cpu=True to Accelerator",
}
_OTHER_ADVICE = (
    "Call torch.distributed.init_process_group and wrap the model in DistributedDataParallel. If the script "
    "has an argument --local_rank, which neither hpctrain nor torchrun passes, use the variable LOCAL_RANK "
    "instead"
)


class ProcessObserver:
    """Counts and records the steps of this process, samples its main thread, and sends both as heartbeats."""

    def __init__(
        self, run: RunDir, attempt: int, ranks: Ranks, environ: Mapping[str, str], *, records_steps: bool
    ) -> None:
        self.run, self.attempt, self.ranks = run, attempt, ranks
        self._environ, self._started_with = environ, dict(environ)
        self._world_size = int(environ["WORLD_SIZE"])
        self._may_train_alone = self._world_size == 1 or environ.get(INDEPENDENT_RANKS_VARIABLE) == "1"
        self._only_notes = environ.get(INDEPENDENT_RANKS_VARIABLE) == _NOTED
        self._step_log = StepLog(run, attempt, self._world_size, ranks.num_nodes) if records_steps else None

    def start(self, connect: Callable[[], Connection]) -> None:
        """Sample this process, and report it through a connection."""
        ScriptMonitor(step_log=self._step_log).start()
        start_heartbeat(connect, self.heartbeat_message, self.on_message)

    def heartbeat_message(self) -> Message:
        return heartbeat.heartbeat_message(self._started_with)

    def on_message(self, connection: Connection, message: Message) -> None:
        heartbeat.on_message(self.run, self.attempt, self.ranks, connection, message)

    def after_step(self) -> None:
        """Check the rank after an optimizer step, and exit if all ranks stop after this step."""
        if not self._may_train_alone:
            self._may_train_alone = has_process_group()
            if not self._may_train_alone and activity.optimizer_steps >= MAX_STEPS_ALONE:
                self.check_end()
        exit_after_step()

    def check_end(self) -> None:
        """Raise an error if the program has trained alone, in a run with several ranks."""
        if self._may_train_alone or activity.is_managed or not activity.optimizer_steps:
            return
        self._may_train_alone = True
        advice = next((_ADVICE[module] for module in _ADVICE if module in sys.modules), _OTHER_ADVICE)
        error = EnvironmentMismatch(
            f"The run has {self._world_size} ranks, but rank {self._environ['RANK']} completed "
            f"{activity.optimizer_steps} optimizer steps without a process group, so each rank trains alone. "
            f"{advice}. If the ranks are supposed to be independent, submit with --independent-ranks."
        )
        if not self._only_notes:
            raise error
        if self._environ["RANK"] == "0":
            print(f"hpctrain: {error}", file=sys.stderr)


#: Launchers of ranks that run with `python -m`.
_LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.launch"}
#: They end when they are collected.
_sidecars: list[Sidecar | None] = []


def observe_process() -> None:
    """Observe this process from now on; a process that an observed process started, only if it trains.

    Helpers, such as data workers, do not train. Launchers do not train either, but the processes that they
    start do, and some launchers import torch.
    """
    if CHILD_VARIABLE not in os.environ or os.path.basename(sys.argv[0]) in RANK_LAUNCHERS:
        return
    if _LAUNCHER_MODULES.intersection(sys.orig_argv):  # `python -m`, for which `sys.argv` is not complete yet
        return
    command = json.loads(os.environ[CHILD_VARIABLE])
    launch = [os.environ.get(name) for name in _LAUNCH_VARIABLES]
    is_restart = int(os.environ[ATTEMPT_VARIABLE]) > 0
    if command.get("launch") != launch or command["pid"] == os.getpid():
        if (observed := _observe(command, launch)) is not None:
            install_step_hook(observed, is_restart=is_restart)
        return

    @cache
    def observe_first() -> Callable[[], None] | None:
        return _observe(command, launch) if _claim_training(command["pid"]) else None

    def after_step() -> None:
        """Observe the process from its first step on, if no other process of its parent has trained."""
        if (observed := observe_first()) is not None:
            observed()

    install_step_hook(after_step, is_restart=is_restart)


#: Names bound by this process, or None if another process has bound it, by parent.
_claims: dict[int, socket.socket | None] = {}


def _claim_training(parent: int) -> bool:
    """Return true if this is the first process to train of `parent` and the processes that it started."""
    if parent not in _claims:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0hpctrain-trains-{parent}")
        except OSError:
            claim.close()
            _claims[parent] = None
        else:
            _claims[parent] = claim
    return _claims[parent] is not None


def _observe(command: Mapping[str, Any], launch: list[str | None]) -> Callable[[], None] | None:
    """Observe this process, and return the function to call after each step; None if it cannot report."""
    run, attempt = attempt_of(os.environ)
    address = os.environ.get(SUPERVISOR_ADDRESS_VARIABLE)
    connect: Callable[[], Connection]
    if address is not None:  # of a batch script
        try:
            ranks = detect(os.environ)
        except UserError:  # The script may know its ranks in another way.
            ranks = detect_local(os.environ)
        host = host_name(os.environ)
        # The name of the process group, equal on all ranks, its size, and the node of this rank.
        facts = {
            "group": ranks.rendezvous_id or f"{host}:{os.getpid()}",
            "world_size": ranks.world_size,
            "host": host,
            "in_step": os.environ.get("SLURM_STEP_ID") != command["step"],
            "outputs": (outputs := _own_outputs(run, attempt)),
        }
        errors = os.path.realpath("/proc/self/fd/2")
        log = Path(errors) if errors in dict(outputs) else run.rank_log(attempt, 0)
        connect = partial(SupervisorConnection, address, ranks, attempt, facts)
    else:
        ranks, connect = Ranks(**command["ranks"]), partial(connect_to_worker, command["socket"])
        log = run.rank_log(attempt, ranks.rank)
    try:
        connect().close()
    except OSError:  # Another job has inherited the variables.
        return None
    os.environ[CHILD_VARIABLE] = json.dumps({**command, "launch": launch, "pid": os.getpid()})
    is_rank = address is not None or launch[1:3] == [str(ranks.rank), str(ranks.world_size)]
    if is_rank and threading.current_thread() is threading.main_thread():
        faulthandler.register(signal.SIGQUIT)
        if all(signal.getsignal(number) is signal.SIG_DFL for number in STOP_SIGNALS):
            agreed_stop.is_enabled = True
            start_signal_recorder(leave_in_time)
            exit_on_stop_signal()
    environ: Mapping[str, str] = os.environ
    # The output of a command shows its other exceptions.
    _record_exceptions(run, attempt, ranks, UserError if address is None else BaseException, log)
    if address is not None:
        _sidecars.append(start_node_sampler(run, ranks, os.environ, _node_index(host, ranks)))
        # The processes of a batch script may be independent.
        environ = {**ranks.torch_variables(), INDEPENDENT_RANKS_VARIABLE: _NOTED, **os.environ}
    is_main = ranks.is_main if address is not None else launch[1] == "0"
    observer = ProcessObserver(run, attempt, ranks, environ, records_steps=is_main)
    compile_cache.install(run, ranks, os.environ)
    if address is not None:
        call_at_exit(announce_exit)
    observer.start(connect if address is not None else partial(reconnect_or_die, connect))
    return partial(_after_step, observer)


def _node_index(host: str, ranks: Ranks) -> int:
    """Return the place of this node in the allocation, in which several groups may have a first node."""
    with suppress(UserError, ValueError):
        return expand_hostlist(os.environ.get("SLURM_JOB_NODELIST", "")).index(host)
    return ranks.node_rank


def _own_outputs(run: RunDir, attempt: int) -> list[tuple[str, int]]:
    """Return the files to which this process writes, the standard output first, but not those of the script.

    The number is the length in bytes, before which the file contains the output of earlier attempts.
    """
    of_script = {os.path.realpath(path) for path in (run.rank_log(attempt, 0), run.slurm_log)}
    outputs: dict[str, int] = {}
    for fd in (1, 2):
        with suppress(OSError):
            path, status = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
            is_file = stat.S_ISREG(status.st_mode) and os.path.samestat(status, os.stat(path))
            if is_file and path not in of_script:
                outputs[path] = status.st_size if attempt else 0
    return list(outputs.items())


def _record_exceptions(
    run: RunDir, attempt: int, ranks: Ranks, recorded: type[BaseException], log: Path
) -> None:
    """Write a failure file if such an exception ends this process."""
    report = sys.excepthook
    environ = {**ranks.torch_variables(), **os.environ, "RANK": str(ranks.rank)}

    def report_and_record(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        report(kind, error, trace)
        if issubclass(kind, recorded) and not is_exiting():
            write_failure(run.failure(attempt, ranks.rank), failure_record(error, environ), log, environ)

    sys.excepthook = report_and_record


def _after_step(observer: ProcessObserver) -> None:
    _claim_training(os.getpid())
    observer.after_step()


def connect_to_worker(name: str) -> Connection:
    """Connect a process of the command to the worker that listens at an abstract address."""
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(f"\0{name}")
    if not _is_own_process(connected):
        connected.close()
        raise PermissionError(f"the socket {name} belongs to another user")
    return Connection(connected)


def reconnect_or_die(connect: Callable[[], Connection]) -> Connection:
    """Connect to the worker, or end this process, because a killed worker cannot end it."""
    try:
        return connect()
    except ConnectionRefusedError:
        os.kill(os.getpid(), signal.SIGKILL)
        raise


def _is_own_process(connected: socket.socket) -> bool:
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


class ChildRelay:
    """Reports one process of a command to the supervisor, or the worker itself while there is none."""

    def __init__(self, worker: ProcessObserver) -> None:
        self._worker = worker
        self._changed = threading.Condition()
        #: The last heartbeat of each connected process; empty before the first.
        self._children: dict[Connection, Message] = {}
        self._heard_at: dict[Connection, float] = {}
        self._supervisor: Connection | None = None
        # An abstract address (unix(7)), which needs no file.
        self._name = f"hpctrain-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self._name}")
        self._socket.listen()
        threading.Thread(target=self._accept, name="hpctrain-children", daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        ranks = {name: value for name, value in vars(self._worker.ranks).items() if name != "sources"}
        return observing_variables({"socket": self._name, "ranks": ranks}, os.environ)

    def start(self, connect: Callable[[], Connection]) -> None:
        start_heartbeat(connect, self.heartbeat_message, self.on_message)

    def heartbeat_message(self) -> Message | None:
        """Return the last heartbeat of the observed process; None if it is silent, as a stopped one is."""
        child, message = self._observed()
        if child is not None and time.monotonic() - self._heard_at.get(child, 0.0) > _SILENT_S:
            return None
        # Standby workers must not import the modules of the command.
        return {**message, "modules": []} if message else self._worker.heartbeat_message()

    def on_message(self, connection: Connection, message: Message) -> None:
        self._supervisor = connection
        child, _ = self._observed()
        if child is None:
            self._worker.on_message(connection, message)
        else:
            with suppress(OSError):
                child.send(message)

    def wait_until_exited(self, timeout_s: float) -> None:
        """Wait until the connected processes have exited, which may outlive their shell."""
        with self._changed:
            self._changed.wait_for(lambda: not self._children, timeout_s)

    def _observed(self) -> tuple[Connection | None, Message]:
        """Return the process whose messages the supervisor receives, and its last heartbeat."""
        with self._changed:
            children = [child for child in self._children.items() if child[1]]
        return max(children, key=lambda child: child[1]["step"] > 0, default=(None, {}))

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError as error:  # too many open files
                problem = f"cannot monitor a process that the command started ({error}); will retry"
                print(f"hpctrain: {problem}", file=sys.stderr)
                time.sleep(1)
                continue
            if not _is_own_process(accepted):
                accepted.close()
                continue
            child = Connection(accepted)
            with self._changed:
                self._children[child] = {}
            threading.Thread(target=self._receive, args=(child,), daemon=True).start()

    def _receive(self, child: Connection) -> None:
        try:
            with closing(child), suppress(OSError, ValueError):
                while (message := child.receive()) is not None:
                    self._on_child_message(child, message)
        finally:
            with self._changed:
                del self._children[child]
                self._heard_at.pop(child, None)
                self._changed.notify_all()

    def _on_child_message(self, child: Connection, message: Message) -> None:
        self._heard_at[child] = time.monotonic()
        if type(message.get("step")) is int:
            with self._changed:
                self._children[child] = message
        elif message and self._supervisor is not None and child is self._observed()[0]:
            with suppress(OSError):
                self._supervisor.send(message)
