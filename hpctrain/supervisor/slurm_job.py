"""The job that this batch script belongs to, as Slurm's commands tell of it."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence

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
_JOB_REQUEUE = re.compile(r"^JobRequeue\s*=\s*(\d+)", re.MULTILINE)

#: Tasks that were killed are gone in less, where their nodes are there.
_STEPS_END_S = 30.0
_LOOK_EVERY_S = 0.5

#: Slurm ends a job that is requeued at once, and all that it has started: SIGKILL comes some seconds later.
_UNTIL_KILLED = ("/bin/sh", "-c", 'trap "" TERM; exec "$@"', "sh")

log = logging.getLogger(__name__)


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
