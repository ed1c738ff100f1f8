"""Why an attempt failed: the files that ranks left, those that had no time to, and which came first."""

from __future__ import annotations

import json
import logging
import re
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hpctrain.jobs.spec import JobSpec
from hpctrain.last_words import LastWords, last_words
from hpctrain.rundir import RunDir
from hpctrain.supervisor.step import Ending, TaskExit

log = logging.getLogger(__name__)

#: What torch says on a rank whose peer went away: the consequence of a failure, not one.
_PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|remote process exited"
    r"|communicator was aborted|did not meet its|recvbytes|socket timeout|wait timeout",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Failure:
    """One rank's failure."""

    rank: int
    host: str
    kind: str
    """`exception`, `signal` or `exit`."""
    error: str
    """Class of the exception, name of the signal, or the exit code."""
    message: str
    log: str
    order: int | None
    """Place among the attempt's failures, by the store's count."""
    time: float
    final: bool = False
    """Whether the rank says that another start would end the same way."""
    classes: tuple[str, ...] = ()
    """Names of the classes of an exception, its own first."""
    out_of_memory: bool = False
    """Whether the kernel ended it, for it took more memory than the job has."""

    @property
    def is_peer_lost(self) -> bool:
        """Whether this rank only noticed that another one was gone."""
        return self.kind == "exception" and bool(_PEER_LOST.search(self.message))

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}: {self.error}: {self.message}".rstrip(": ")


def collect(
    run: RunDir, spec: JobSpec, attempt: int, exits: Iterable[TaskExit], hosts: list[str], since: int = 0
) -> list[Failure]:
    """Failures of `attempt`: one file a failed rank; what a rank could not write itself is written here.

    Args:
        run: the run.
        spec: of the run.
        attempt: which start of the ranks.
        exits: processes that ended by themselves.
        hosts: the nodes, in order of their rank.
        since: how long the job's own log was, in bytes, when the attempt began.
    """
    failures = {failure.rank: failure for failure in _read(run, attempt)}
    if spec.torchrun is not None and failures:
        # An agent ends so because its ranks do.
        return list(failures.values())
    ranks_of_each = spec.tasks_per_node // spec.processes_per_node
    for task in exits:
        rank = task.rank * ranks_of_each
        if task.ending is Ending.FAILED and rank not in failures:
            host = hosts[task.rank // spec.processes_per_node]
            log = run.rank_log(attempt, rank) if spec.torchrun is None else run.agent_log(attempt, task.rank)
            words = last_words(log, run.slurm_log, since, task.signal)
            failures[rank] = _write(run, attempt, rank, task, host, words)
    return list(failures.values())


def root_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that the others follow from.

    A signal from outside comes first: no peer's error brings it about. An abort may be a library's answer
    to a lost peer, and so counts after exceptions; a lost connection never is the cause while there is
    another. Among equals the store's count decides, and then the time.
    """

    def precedence(failure: Failure) -> tuple[int, float, float]:
        if failure.is_peer_lost:
            tier = 3
        elif failure.kind == "signal":
            tier = 2 if failure.error == signal.SIGABRT.name else 0
        else:
            tier = 1
        order = float("inf") if failure.order is None else failure.order
        return tier, order, failure.time

    return min(failures, key=precedence)


def _read(run: RunDir, attempt: int) -> Iterable[Failure]:
    for path in run.failure_files(attempt):
        try:
            record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            yield Failure(
                rank=record["rank"],
                host=record.get("node") or record["host"],
                kind=record["kind"],
                error=record["error"],
                message=record["message"],
                log=record["log"],
                order=record["order"],
                time=record["time"],
                final=record.get("final", False),
                classes=tuple(record.get("classes", ())),
            )
        except (OSError, ValueError, KeyError) as error:
            log.warning("%s cannot be read: %s", path, error)


def _write(run: RunDir, attempt: int, rank: int, task: TaskExit, host: str, words: LastWords) -> Failure:
    """Describe a rank that ended without a word, or the first one of an agent that did."""
    message = words.message
    if task.out_of_memory:
        message = "out of memory: it took more than the job has on this node (--mem)"
    failure = Failure(
        rank=rank,
        host=host,
        kind="signal" if task.signal else "exit",
        error=task.signal.name if task.signal else f"exit code {task.code}",
        message=message,
        log=str(words.log),
        order=None,
        time=time.time(),
        out_of_memory=task.out_of_memory,
    )
    record = {**failure.__dict__, "node": host, "traceback": words.traceback}
    run.write(run.failure(attempt, rank), json.dumps(record, indent=1) + "\n")
    return failure
