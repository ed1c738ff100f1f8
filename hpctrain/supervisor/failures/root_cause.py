"""Read and write the failure files of an attempt's ranks, and find and classify the root cause."""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from msgspec.structs import asdict, replace

from hpctrain import system
from hpctrain.errors import DataWorkerKilled, DiskFull, RendezvousError
from hpctrain.files import open_regular
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.restart_policy import EndKind
from hpctrain.record_types import FailureRecord, read_record
from hpctrain.records.crash_output import (
    UNFINISHED,
    UNFINISHED_ADVICE,
    CrashOutput,
    find_crash_output,
    is_peer_lost,
)
from hpctrain.rundir import RunDir
from hpctrain.slurm.srun_step import TaskExit, TaskResult, parse_task_report
from hpctrain.supervisor.workers.observed_groups import NOTHING_SURVIVED, RankLoss, Survival
from hpctrain.text import short_name, signal_name

log = logging.getLogger(__name__)

#: Exit codes of a shell that cannot execute or find a command (POSIX).
_NOT_EXECUTED = (126, 127)
#: Messages of CUDA and the driver for faults of the device itself (CUDA Runtime API, cudaError_t 46, 100, 214
#: and others). Illegal addresses are excluded: these are faults of a kernel, and thus of the script.
_GPU = re.compile(
    r"uncorrectable|\becc\b.*error|\bxid\b|fallen off the bus|gpu is lost|hardware stack error"
    r"|nvlink.*error|device(?:\(s\))? is/are busy or unavailable|devices? unavailable|no cuda-capable device",
    re.IGNORECASE,
)
#: Signals of crashes and kills. A shell whose command they ended exits with 128 + the number (POSIX).
_FATAL_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGKILL, signal.SIGSEGV}
)
_BY_DESCRIPTION = {signal.strsignal(number): number for number in _FATAL_SIGNALS}
#: Report of a shell on a command that a signal has ended; in bash: `job.sh: line 9: 4711 Killed   python …`.
_SHELL_REPORT = re.compile(rf"(?:^|: line \d+: +\d+ )({'|'.join(filter(None, _BY_DESCRIPTION))})\b", re.ASCII)
#: Title and lines of torchrun's report on the worker that failed first (torch 2.6 to 2.14).
_TORCHRUN_ROOT = "Root Cause (first observed failure):"
_TORCHRUN_FACT = re.compile(
    r" +(?:host +: (?P<host>[\w.-]+)|rank +: (?P<rank>\d{1,9})|exitcode +: -(?P<signal>\d{1,3}))\b", re.ASCII
)
_GPU_OOM = re.compile(r"cuda out of memory|cublas_status_alloc_failed|hip out of memory", re.IGNORECASE)
_OOM = re.compile(r"can't allocate memory|cannot allocate memory|\bbad_alloc\b", re.IGNORECASE)
_COLLECTIVE = re.compile(
    r"\bncc?l\b.*(?:error|timeout|timed out|abort)|\bgloo\b.*(?:error|timeout|timed out)"
    r"|enforce fail at .*\bgloo\b",
    re.IGNORECASE,
)


#: Exception classes of failed communication.
_COMMUNICATION = frozenset(
    {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", RendezvousError.__name__}
)
#: Exception classes caused by the environment, which may not recur in the next attempt.
_MAY_PASS = frozenset(
    {"OSError", "EOFError", "DistError", "AcceleratorError", "CheckpointError", RendezvousError.__name__}
)


class RankFailure(FailureRecord, frozen=True):
    @property
    def is_peer_lost(self) -> bool:
        """True if this rank only detected that another rank was gone."""
        return self.kind == "exception" and is_peer_lost(self.message, self.classes)

    def __str__(self) -> str:
        place = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{place}: {self.error}: {self.message}".rstrip(": ")


def collect_failures(
    run: RunDir,
    spec: JobSpec,
    attempt: int,
    exits: Iterable[TaskExit],
    hosts: list[str],
    since: int = 0,
    early_exits: Mapping[int, str] | None = None,
    survival: Survival = NOTHING_SURVIVED,
) -> list[RankFailure]:
    """Return the failures that ended `attempt`, and write the failure files that ranks could not write."""
    failures = {
        failure.rank: failure for failure in read_failures(run, attempt) if not survival.covers(failure)
    }
    time_s = system.time()
    for rank, location in (early_exits or {}).items():
        if rank not in failures:
            host, log_path = hosts[rank // spec.ntasks_per_node], str(run.rank_log(attempt, rank))
            failure = RankFailure(rank, host, UNFINISHED, location, UNFINISHED_ADVICE, log_path, None, time_s)
            failures[rank] = _write(run, attempt, failure)
    if spec.program == "batch" and all(failure.is_peer_lost for failure in failures.values()):
        lost = [loss for loss in survival.losses if not survival.covers(loss)]
        for failure in killed_tasks(run.slurm_log, since, lost):
            # torchrun prints the full name of the host, which may be unlike Slurm's name of the node.
            nodes = {short_name(host): host for host in hosts}
            host = hosts[0] if len(hosts) == 1 else nodes.get(short_name(failure.host), "")
            failure = replace(failure, host=host, log=str(run.log_of(attempt, failure.rank)))
            failures[failure.rank] = _write(run, attempt, failure)
    if (spec.torchrun is not None or spec.program == "batch") and failures:
        # An agent or a batch script fails because its ranks fail.
        return list(failures.values())
    ranks_per_process = spec.ntasks_per_node // spec.processes_per_node
    for task in exits:
        rank, number, crash_signal = task.rank * ranks_per_process, (task.code or 0) - 128, task.signal
        if spec.program in ("command", "batch") and number in _FATAL_SIGNALS:
            task = TaskExit(task.rank, None, number, task.out_of_memory)
            # The shell of a batch script prints which of its commands was killed.
            crash_signal = None if spec.program == "batch" else number
        if task.out_of_memory and rank in failures:
            # Such as an exception of a rank whose data worker was killed.
            failures[rank] = replace(failures[rank], out_of_memory=True)
        if task.result is TaskResult.FAILED and rank not in failures:
            host = hosts[task.rank // spec.processes_per_node]
            log = run.rank_log(attempt, rank) if spec.torchrun is None else run.agent_log(attempt, task.rank)
            crash = find_crash_output(log, run.slurm_log, since, crash_signal)
            failures[rank] = _write(run, attempt, _of_task(rank, host, task, crash), crash.traceback)
    return list(failures.values())


def killed_tasks(job_log: Path, since: int, lost: Sequence[RankLoss] = ()) -> Iterator[RankFailure]:
    """Yield the first killed rank of a batch script, as srun or torchrun reports it in the job's log.

    Without a report, it is the rank whose connection was lost first.
    """
    shell_signal = signal.SIGKILL
    with suppress(OSError), open_regular(job_log) as file:
        file.seek(since)
        root: dict[str, str] | None = None
        for raw in file:
            line = raw.decode(errors="replace").rstrip("\n")
            tasks = parse_task_report(line)
            host = line.split(": ")[2] if tasks else ""
            if line.startswith(_TORCHRUN_ROOT):
                root = {}
            elif root is not None and (match := _TORCHRUN_FACT.match(line)):
                root |= {name: text for name, text in match.groupdict().items() if text}
                if match["signal"]:
                    tasks = [TaskExit(int(root.get("rank", "0")), None, int(match["signal"]))]
                    host, root = root.get("host", ""), None
            if match := _SHELL_REPORT.search(line):
                shell_signal = _BY_DESCRIPTION.get(match[1], shell_signal)
            for task in tasks:
                if task.signal not in (None, signal.SIGTERM):
                    crash = find_crash_output(job_log, job_log, since, task.signal)
                    yield _of_task(task.rank, host, task, crash)
                    return
    for loss in sorted(lost, key=lambda loss: loss.time)[:1]:
        crash = find_crash_output(job_log, job_log, since, shell_signal)
        yield _of_task(loss.rank, loss.host, TaskExit(loss.rank, None, shell_signal), crash)


def root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """Return the failure that caused the others.

    External signals have the highest priority: an error of a peer does not cause them. Aborts have a lower
    priority than exceptions, because an abort may be a library's reaction to a lost peer. A lost connection
    is the cause only if there is no other failure. Ties are broken by the store's count, then by time.
    """

    def precedence(failure: RankFailure) -> tuple[int, float, float]:
        if failure.is_peer_lost:
            tier = 3
        elif failure.kind == "signal":
            tier = 2 if failure.error == signal.SIGABRT.name else 0
        else:
            tier = 1
        order = float("inf") if failure.order is None else failure.order
        return tier, order, failure.time

    return min(failures, key=precedence)


def read_failures(run: RunDir, attempt: int) -> Iterable[RankFailure]:
    for path in run.failure_files(attempt):
        try:
            failure = read_record(path, RankFailure)
            yield replace(failure, host=failure.node or failure.host)
        except (OSError, ValueError) as error:
            log.warning("cannot read %s: %s", path, error)


def _of_task(rank: int, host: str, task: TaskExit, crash: CrashOutput) -> RankFailure:
    """Describe a rank, or the first rank of an agent, that exited without a failure file."""
    message = crash.message
    if task.out_of_memory:
        message = "out of memory: the job exceeded its memory limit on this node (see --mem)"
    kind, error = ("signal", signal_name(task.signal)) if task.signal else ("exit", f"exit code {task.code}")
    failure = RankFailure(rank, host, kind, error, message, str(crash.log), None, system.time())
    is_final = kind == "exit" and task.code in _NOT_EXECUTED
    return replace(failure, out_of_memory=task.out_of_memory, final=is_final)


def _write(run: RunDir, attempt: int, failure: RankFailure, traceback: str = "") -> RankFailure:
    record = replace(failure, node=failure.host, traceback=traceback)
    run.write(run.failure(attempt, failure.rank), json.dumps(asdict(record), indent=1) + "\n")
    return failure


def classify(failure: RankFailure, *, has_xid: bool = False) -> EndKind:
    """Return the kind of a root-cause failure: the first condition that holds decides.

    `USER_ERROR` is determined elsewhere. `has_xid` is true if the driver reported a GPU fault on the node.
    """
    text = f"{failure.error}: {failure.message}"
    classes = {failure.error, *failure.classes}
    if has_xid:
        return EndKind.GPU
    if failure.kind == UNFINISHED:
        return EndKind.UNFINISHED
    if failure.corruption is not None:
        return EndKind.CORRUPTION
    if "Unauthenticated" in classes:
        return EndKind.UNAUTHENTICATED
    if DiskFull.__name__ in classes:
        return EndKind.DISK_FULL
    if failure.out_of_memory or "MemoryError" in classes:
        return EndKind.OOM
    if "OutOfMemoryError" in classes or _GPU_OOM.search(text):
        return EndKind.GPU_OOM
    if _GPU.search(text):
        return EndKind.GPU
    if DataWorkerKilled.__name__ in classes:
        return EndKind.KILLED if signal.SIGKILL.name in failure.message else EndKind.SIGNAL
    if failure.kind == "signal" and failure.error == signal.SIGKILL.name:
        return EndKind.KILLED
    if failure.is_peer_lost or classes & _COMMUNICATION or _COLLECTIVE.search(text):
        return EndKind.COMMUNICATION
    if failure.kind == "signal":
        return EndKind.SIGNAL
    return EndKind.OOM if _OOM.search(text) else EndKind.PYTHON


def is_deterministic(failure: RankFailure) -> bool:
    """Return true if the class of the exception suggests that the next attempt would fail in the same way."""
    return failure.kind == "exception" and not _MAY_PASS.intersection(failure.classes)
