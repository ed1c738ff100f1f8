"""Whoever gave the job its place, as the supervisor needs it: Slurm, or a stand-in on a laptop."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from hpctrain.cluster import compress_hostlist, expand_hostlist
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.chain import can_start_without, excluded_nodes, find_successor, hand_on
from hpctrain.jobs.duration import parse_duration
from hpctrain.jobs.environment import outer_environment
from hpctrain.jobs.lease import Holder, Lease
from hpctrain.jobs.slurm_command import job_fields, run_slurm, steps_of
from hpctrain.jobs.slurm_status import timestamp
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.states import RunState, from_slurm
from hpctrain.last_words import size_of
from hpctrain.rundir import PREDECESSOR_VARIABLE, RunDir
from hpctrain.supervisor.nodes import lost_nodes
from hpctrain.supervisor.will import Fate

# As in `slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-21T11:02:09 DUE TO PREEMPTION ***`.
_EVICTED = re.compile(r"\*\*\* (?:JOB|STEP) .* DUE TO (?:PREEMPTION|NODE FAILURE)")
#: Slurm's signal before the time limit may come so much earlier than asked for (sbatch(1), --signal).
SIGNAL_EARLY_S = 60.0
_JOB_REQUEUE = re.compile(r"^JobRequeue\s*=\s*(\d+)", re.MULTILINE)

#: Tasks that were killed are gone in less, where their nodes are there.
_STEPS_END_S = 30.0
_LOOK_EVERY_S = 0.5

#: Slurm ends a job that is requeued at once, and all that it has started: SIGKILL comes some seconds later.
_UNTIL_KILLED = ("/bin/sh", "-c", 'trap "" TERM; exec "$@"', "sh")

log = logging.getLogger(__name__)


class Scheduler(Protocol):
    """What the supervisor asks of the scheduler."""

    #: Name of the job, as submission recorded it.
    job_id: str
    #: The job that this one was submitted to continue; None where the user submitted it.
    predecessor: str | None
    #: Signals to the supervisor, and which one the ranks then need; None where they have it already.
    on_signal: Mapping[signal.Signals, signal.Signals | None]
    #: Signals by which the user, and not the scheduler, ends the job.
    cancels: frozenset[signal.Signals]
    #: Whether nodes are machines of their own, so that one may be at fault and another not.
    has_machines: bool

    @property
    def lease(self) -> Lease | None:
        """To be held by whoever trains in the run's folder; None where the run's lock is enough."""

    @property
    def ends_job_at(self) -> float | None:
        """When the supervisor has to end the job, on the monotonic clock; None where the scheduler does."""

    def fate(self) -> Fate:
        """What the scheduler does with the job now."""

    def seconds_left(self) -> float | None:
        """Time until the job's limit; None where there is none, or nobody knows."""

    def requeue(self) -> bool:
        """Put the job back into the queue. True: this process is about to be ended. False: go on here.

        Raises:
            SchedulerError: the scheduler refused.
        """

    def requeues(self) -> bool:
        """Whether the site requeues jobs, and would requeue this one."""

    def others_fit(self, left_out: Collection[str]) -> bool:
        """Whether the site could start the job on other nodes than these."""

    def free_nodes(self, left_out: Collection[str]) -> int:
        """How many nodes the job could have besides its own, because nobody else wants them.

        Raises:
            SchedulerError: the scheduler does not answer.
        """

    def exclude(self, left_out: Collection[str]) -> None:
        """Have the job, which is back in the queue, not start on these nodes.

        Raises:
            SchedulerError: the scheduler refused.
        """

    def hand_on(self, attempt: int, left_out: Collection[str] = ()) -> str:
        """Have a successor job continue the run after `attempt`, and return its id. This job is to end then.

        Args:
            attempt: the start of the ranks that is to be continued.
            left_out: nodes on which it is not to start.

        Raises:
            SchedulerError: the scheduler refused, or does not answer.
        """

    def lost_nodes(self, hosts: Sequence[str]) -> dict[str, str]:
        """Those of the job's nodes on which nothing can run any more, and why.

        Raises:
            SchedulerError: the scheduler does not answer.
        """

    def end_steps(self) -> None:
        """End the tasks that a killed supervisor of this job has left. Waits, for a bounded time."""

    def submitted_at(self) -> float | None:
        """When this job was submitted, in seconds since the epoch; None where nobody knows."""

    def is_running(self, job_id: str) -> bool:
        """Whether another job has begun, and is not gone yet.

        Raises:
            SchedulerError: the scheduler does not answer.
        """

    def keep(self, hosts: Sequence[str]) -> None:
        """Give all other nodes of the job back, so that their loss does not end it.

        Raises:
            SchedulerError: the scheduler refused.
        """

    def find_successor(self) -> str | None:
        """The job that was submitted to continue this one, if there is any.

        Raises:
            SchedulerError: the scheduler does not answer.
        """


def own_job_id(environ: Mapping[str, str]) -> str:
    """The job that this batch script belongs to, in Slurm's commands.

    A task of an array is named by the array and its number. SLURM_JOB_ID is a number of its own for all tasks
    but one: the last one's is that of the whole array, and a request by it would meet all other tasks.
    """
    if "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


class SlurmJob:
    """The job that this batch script belongs to."""

    ends_job_at: float | None = None
    # Slurm signals the steps itself; SIGTERM to the batch script says that it is ending the job.
    on_signal: Mapping[signal.Signals, signal.Signals | None] = {signal.SIGTERM: None}
    cancels: frozenset[signal.Signals] = frozenset()
    has_machines = True

    def __init__(self, run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
        self.job_id = own_job_id(environ)
        self.predecessor = environ.get(PREDECESSOR_VARIABLE)
        self._run, self._spec, self._batch_environ = run, spec, environ
        self._environ = outer_environment(environ)
        self._restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self.lease = Lease(run, self.job_id, self._restarts, self._environ, _leave)
        self._said = size_of(run.slurm_log)

    def fate(self) -> Fate:
        """What the job's record says; why it ends stands in its log. See `Scheduler.fate`.

        Whatever the cause, the state is COMPLETING until the last process is gone (seen with Slurm 22.05).
        """
        fields = job_fields(self.job_id, self._environ)
        if fields.get("JobState", "RUNNING") == "RUNNING":
            return Fate.STAYS
        if int(fields.get("Restarts", "0")) > self._restarts:
            return Fate.REQUEUED
        return Fate.EVICTED if _EVICTED.search(self._log()) else Fate.ENDS

    def seconds_left(self) -> float | None:
        """What `squeue` says. See `Scheduler.seconds_left`."""
        text = run_slurm(
            ["squeue", "--noheader", f"--jobs={self.job_id}", "--format=%L"], self._environ
        ).strip()
        try:
            return parse_duration(text)
        except SpecError:
            return None  # UNLIMITED, NOT_SET, INVALID

    def requeue(self) -> bool:
        """`scontrol requeue`. See `Scheduler.requeue`."""
        run_slurm(["scontrol", "requeue", self.job_id], self._environ)
        return True

    def requeues(self) -> bool:
        """What the configuration and the job's record say. See `Scheduler.requeues`."""
        if job_fields(self.job_id, self._environ).get("Requeue") == "0":
            return False
        match = _JOB_REQUEUE.search(run_slurm(["scontrol", "show", "config"], self._environ))
        return match is None or match[1] != "0"

    def others_fit(self, left_out: Collection[str]) -> bool:
        """What `sbatch --test-only` says. See `Scheduler.others_fit`."""
        return can_start_without(self._run, self._spec, left_out, self._batch_environ)

    def free_nodes(self, left_out: Collection[str]) -> int:
        """Idle nodes of the partition, where no other job waits in it. See `Scheduler.free_nodes`."""
        partition = self._batch_environ.get("SLURM_JOB_PARTITION", "")
        waiting = ["squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--format=%i"]
        if run_slurm(waiting, self._environ).strip():
            return 0
        idle = ["sinfo", "--noheader", "--Node", f"--partition={partition}", "--states=idle", "--format=%N"]
        excluded = expand_hostlist(self._spec.directives.get("exclude", ""))
        found = set(run_slurm(idle, self._environ).split())
        return len(found.difference(left_out, excluded))

    def exclude(self, left_out: Collection[str]) -> None:
        """Change the job's own list, which Slurm allows of a pending job. See `Scheduler.exclude`."""
        nodes = excluded_nodes(self._spec, left_out)
        command = ["scontrol", "update", f"JobId={self.job_id}", f"ExcNodeList={nodes}"]
        run_slurm([*_UNTIL_KILLED, *command], self._environ)

    def hand_on(self, attempt: int, left_out: Collection[str] = ()) -> str:
        """Submit the same script again, to start after this job. See `Scheduler.hand_on`."""
        return hand_on(self._run, self._spec, self.job_id, attempt, self._batch_environ, left_out)

    def lost_nodes(self, hosts: Sequence[str]) -> dict[str, str]:
        """What each node's slurmd says. See `Scheduler.lost_nodes`."""
        return lost_nodes(hosts, self._environ)

    def end_steps(self) -> None:
        """What `scancel` does. See `Scheduler.end_steps`."""
        deadline = time.monotonic() + _STEPS_END_S
        try:
            while (steps := steps_of([self.job_id], self._environ)) and time.monotonic() < deadline:
                run_slurm(["scancel", "--signal=KILL", *steps], self._environ)
                time.sleep(_LOOK_EVERY_S)
        except SchedulerError as error:
            log.warning("Ranks of before may still be there: %s", error)

    def submitted_at(self) -> float | None:
        """What the job's record says. See `Scheduler.submitted_at`."""
        try:
            return timestamp(job_fields(self.job_id, self._environ).get("SubmitTime", ""))
        except SchedulerError as error:
            log.warning("when this job was submitted cannot be told: %s", error)
            return None

    def is_running(self, job_id: str) -> bool:
        """What the job's record says. See `Scheduler.is_running`."""
        try:
            state = job_fields(job_id, self._environ).get("JobState", "")
        except SchedulerError as error:
            if "Invalid job id" not in str(error):
                raise
            return False
        return from_slurm(state) is RunState.RUNNING

    def keep(self, hosts: Sequence[str]) -> None:
        """Shrink the job, as `scontrol` allows it of a running one. See `Scheduler.keep`."""
        # It leaves a script behind, where it is started, that tells a shell of the new size.
        with tempfile.TemporaryDirectory() as folder:
            nodes = f"NodeList={compress_hostlist(list(hosts))}"
            command = ["scontrol", "update", f"JobId={self.job_id}", nodes]
            run_slurm(["env", f"--chdir={folder}", *command], self._environ)

    def find_successor(self) -> str | None:
        """What `squeue` lists. See `Scheduler.find_successor`."""
        return find_successor(self._run, self.job_id, self._environ)

    def _log(self) -> str:
        """What was printed since this job started."""
        try:
            with open(self._run.slurm_log, encoding="utf-8", errors="replace") as log:
                log.seek(self._said)
                return log.read()
        except OSError:
            return ""


def _leave(heir: Holder) -> None:
    """End this process at once, and with it the job: another one trains in the folder now."""
    words = f"Job {heir.job_id} has taken over the run: this one was silent for too long. It ends here."
    log.critical(words)
    print(f"Error: {words}", file=sys.stderr, flush=True)
    os._exit(SpecError.exit_code)


class LocalJob:
    """A laptop's stand-in for the scheduler: the time limit, preemption by SIGUSR2, the user's SIGTERM."""

    on_signal: Mapping[signal.Signals, signal.Signals | None] = {
        signal.SIGUSR2: signal.SIGTERM,
        signal.SIGTERM: signal.SIGTERM,
        signal.SIGINT: signal.SIGTERM,
    }
    cancels = frozenset({signal.SIGTERM, signal.SIGINT})
    has_machines = False
    predecessor: str | None = None
    lease = None

    def __init__(self, spec: JobSpec) -> None:
        in_array = spec.array_task is not None
        self.job_id = f"{os.getppid()}_{spec.array_task}" if in_array else str(os.getpid())
        self._limit_s = spec.time_limit_s
        self._begun = time.monotonic()

    @property
    def ends_job_at(self) -> float | None:
        """The end of the specification's time limit."""
        return None if self._limit_s is None else self._begun + self._limit_s

    def fate(self) -> Fate:
        """Nobody but the user ends a job here."""
        return Fate.STAYS

    def seconds_left(self) -> float | None:
        """What is left of the specification's limit. See `Scheduler.seconds_left`."""
        return None if self.ends_job_at is None else self.ends_job_at - time.monotonic()

    def requeue(self) -> bool:
        """The queue is empty, so the job starts again at once, in this process, with all its time."""
        self._begun = time.monotonic()
        return False

    def requeues(self) -> bool:
        """A place in the queue is to be had for the asking."""
        return True

    def others_fit(self, left_out: Collection[str]) -> bool:  # noqa: ARG002
        """There is one machine."""
        return False

    def free_nodes(self, left_out: Collection[str]) -> int:  # noqa: ARG002
        """There is one machine."""
        return 0

    def exclude(self, left_out: Collection[str]) -> None:
        """There is one machine."""

    def hand_on(self, attempt: int, left_out: Collection[str] = ()) -> str:  # noqa: ARG002
        """There is no queue in which another job could wait. See `Scheduler.hand_on`."""
        raise SchedulerError("There are no successor jobs without Slurm.")

    def lost_nodes(self, hosts: Sequence[str]) -> dict[str, str]:  # noqa: ARG002
        """Pretend nodes are there as long as this machine is."""
        return {}

    def end_steps(self) -> None:
        """Ranks here end with their supervisor."""

    def submitted_at(self) -> float | None:
        """It began then."""
        return None

    def is_running(self, job_id: str) -> bool:  # noqa: ARG002
        """The run's lock tells, and no queue. See `Scheduler.is_running`."""
        return False

    def keep(self, hosts: Sequence[str]) -> None:
        """Nobody takes notice of pretend nodes."""

    def find_successor(self) -> str | None:
        return None
