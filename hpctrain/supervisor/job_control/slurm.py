"""Job control through Slurm's commands, for the job of this batch script."""

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
from hpctrain.crash_output import file_size
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.files import open_regular
from hpctrain.records.lease import Lease, LeaseHolder
from hpctrain.records.successor import can_start_without, excluded_nodes, find_successor, submit_successor
from hpctrain.rundir import PREDECESSOR_VARIABLE, RunDir
from hpctrain.slurm.command import list_rank_steps, query_job_fields, run_slurm
from hpctrain.slurm.duration import parse_duration
from hpctrain.slurm.environment import strip_job_env
from hpctrain.slurm.parsing import SOON_S, parse_timestamp
from hpctrain.slurm.states import RunState, parse_job_state
from hpctrain.spec.job_spec import JobSpec
from hpctrain.supervisor.job_control.node_health import lost_nodes
from hpctrain.supervisor.policy.job_intent import JobDisposition

# As in `slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-21T11:02:09 DUE TO PREEMPTION ***`.
_EVICTED = re.compile(r"\*\*\* (?:JOB|STEP) .* DUE TO (?:PREEMPTION|NODE FAILURE)")
#: `Epilog = (null)` means none; newer versions number them, as in `Epilog[0]`.
_EPILOG = re.compile(r"^Epilog(?:Slurmctld)?(?:\[\d+\])?\s*=\s*(?!\(null\)|\s)", re.MULTILINE)
_JOB_REQUEUE = re.compile(r"^JobRequeue\s*=\s*(\d+)", re.MULTILINE)

#: Time for killed tasks to disappear; they need less if their nodes are up.
_STEPS_END_S = 30.0
_LOOK_EVERY_S = 0.5

#: Seconds within which the job of an exiting supervisor is gone if there is no epilog.
_GONE_S = 10

#: Slurm ends a requeued job and all its processes at once: SIGKILL follows some seconds later.
_UNTIL_KILLED = ("/bin/sh", "-c", 'trap "" TERM; exec "$@"', "sh")

log = logging.getLogger(__name__)


def own_job_id(environ: Mapping[str, str]) -> str:
    """Return the id of this batch script's job for Slurm's commands.

    An array task is named by the array and its index. SLURM_JOB_ID is a separate number for all tasks but the
    last. The last task has the number of the whole array, so a request by it would affect all other tasks.
    """
    if "SLURM_ARRAY_TASK_ID" in environ:
        return f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    return environ["SLURM_JOB_ID"]


class SlurmJobControl:
    """The job of this batch script."""

    ends_job_at: float | None = None
    # Slurm signals the steps itself; SIGTERM to the batch script means that it is ending the job.
    on_signal: Mapping[signal.Signals, signal.Signals | None] = {signal.SIGTERM: None}
    cancels: frozenset[signal.Signals] = frozenset()
    has_machines = True

    def __init__(self, run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
        self.job_id = own_job_id(environ)
        self.predecessor = environ.get(PREDECESSOR_VARIABLE)
        self._run, self._spec, self._batch_environ = run, spec, environ
        self._environ = strip_job_env(environ)
        self._restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self.lease = Lease(run, self.job_id, self._restarts, self._environ, _leave)
        self._said = file_size(run.slurm_log)

    def fate(self) -> JobDisposition:
        """Read the job's state, and the reason for its end from its log. See `JobControl.fate`.

        Whatever the cause, the state is COMPLETING until the last process is gone (seen with Slurm 22.05).
        """
        fields = query_job_fields(self.job_id, self._environ)
        if fields.get("JobState", "RUNNING") == "RUNNING":
            return JobDisposition.STAYS
        if int(fields.get("Restarts", "0")) > self._restarts:
            return JobDisposition.REQUEUED
        return JobDisposition.EVICTED if _EVICTED.search(self._log()) else JobDisposition.ENDS

    def seconds_left(self) -> float | None:
        """Ask `squeue`. See `JobControl.seconds_left`."""
        text = run_slurm(
            ["squeue", "--noheader", f"--jobs={self.job_id}", "--format=%L"], self._environ
        ).strip()
        try:
            return parse_duration(text)
        except SpecError:
            return None  # UNLIMITED, NOT_SET, INVALID

    def requeue(self) -> bool:
        """Run `scontrol requeue`. See `JobControl.requeue`."""
        run_slurm(["scontrol", "requeue", self.job_id], self._environ)
        return True

    def requeues(self) -> bool:
        """Read the configuration and the job's record. See `JobControl.requeues`."""
        if query_job_fields(self.job_id, self._environ).get("Requeue") == "0":
            return False
        match = _JOB_REQUEUE.search(run_slurm(["scontrol", "show", "config"], self._environ))
        return match is None or match[1] != "0"

    def others_fit(self, left_out: Collection[str]) -> bool:
        """Ask `sbatch --test-only`. See `JobControl.others_fit`."""
        return can_start_without(self._run, self._spec, left_out, self._batch_environ)

    def free_nodes(self, left_out: Collection[str]) -> int:
        """Count the partition's idle nodes if no other job waits in it. See `JobControl.free_nodes`."""
        partition = self._batch_environ.get("SLURM_JOB_PARTITION", "")
        waiting = ["squeue", "--noheader", "--states=PENDING", f"--partition={partition}", "--format=%i"]
        if run_slurm(waiting, self._environ).strip():
            return 0
        idle = ["sinfo", "--noheader", "--Node", f"--partition={partition}", "--states=idle", "--format=%N"]
        excluded = expand_hostlist(self._spec.directives.get("exclude", ""))
        found = set(run_slurm(idle, self._environ).split())
        return len(found.difference(left_out, excluded))

    def exclude(self, left_out: Collection[str]) -> None:
        """Change the job's own list, which Slurm allows for a pending job. See `JobControl.exclude`."""
        nodes = excluded_nodes(self._spec, left_out)
        command = ["scontrol", "update", f"JobId={self.job_id}", f"ExcNodeList={nodes}"]
        run_slurm([*_UNTIL_KILLED, *command], self._environ)

    def hand_on(self, attempt: int, left_out: Collection[str] = ()) -> str:
        """Submit the same script again, to start after this job. See `JobControl.hand_on`."""
        return submit_successor(self._run, self._spec, self.job_id, attempt, self._batch_environ, left_out)

    def lost_nodes(self, hosts: Sequence[str]) -> dict[str, str]:
        """Ask each node's slurmd. See `JobControl.lost_nodes`."""
        return lost_nodes(hosts, self._environ)

    def end_steps(self) -> None:
        """Kill the steps with `scancel`. See `JobControl.end_steps`."""
        deadline = time.monotonic() + _STEPS_END_S
        try:
            while (steps := list_rank_steps([self.job_id], self._environ)) and time.monotonic() < deadline:
                run_slurm(["scancel", "--signal=KILL", *steps], self._environ)
                time.sleep(_LOOK_EVERY_S)
        except SchedulerError as error:
            log.warning("ranks of an earlier attempt may still be running: %s", error)

    def submitted_at(self) -> float | None:
        """Read the job's record. See `JobControl.submitted_at`."""
        try:
            return parse_timestamp(query_job_fields(self.job_id, self._environ).get("SubmitTime", ""))
        except SchedulerError as error:
            log.warning("cannot determine when this job was submitted: %s", error)
            return None

    def is_running(self, job_id: str) -> bool:
        """Read the job's record. See `JobControl.is_running`."""
        try:
            state = query_job_fields(job_id, self._environ).get("JobState", "")
        except SchedulerError as error:
            if "Invalid job id" not in str(error):
                raise
            return False
        return parse_job_state(state) is RunState.RUNNING

    def keep(self, hosts: Sequence[str]) -> None:
        """Shrink the running job with `scontrol`. See `JobControl.keep`."""
        # scontrol writes a shell script with the new size into its working directory.
        with tempfile.TemporaryDirectory() as folder:
            nodes = f"NodeList={compress_hostlist(list(hosts))}"
            command = ["scontrol", "update", f"JobId={self.job_id}", nodes]
            run_slurm(["env", f"--chdir={folder}", *command], self._environ)

    def find_successor(self) -> str | None:
        """Search the output of `squeue`. See `JobControl.find_successor`."""
        return find_successor(self._run, self.job_id, self._environ)

    def _log(self) -> str:
        """Return the job's output since it started."""
        try:
            with open_regular(self._run.slurm_log) as log:
                log.seek(self._said)
                return log.read().decode(errors="replace")
        except OSError:
            return ""


def start_soon(environ: Mapping[str, str]) -> None:
    """Give this job an early start time if Slurm has requeued it. Call this last before the exit.

    Slurm delays a requeued job by two minutes after its last process and its epilog have ended. A later start
    time of the job itself replaces that delay (`batch_requeue_fini`).
    """
    job_id, outer = own_job_id(environ), strip_job_env(environ)
    try:
        restarts = int(query_job_fields(job_id, outer).get("Restarts", "0"))
        if restarts <= int(environ.get("SLURM_RESTART_COUNT", "0")):
            return
        config = run_slurm(["scontrol", "show", "config"], outer)
        delay_s = SOON_S if _EPILOG.search(config) else _GONE_S
        command = ["scontrol", "update", f"JobId={job_id}", f"StartTime=now+{delay_s}"]
        run_slurm([*_UNTIL_KILLED, *command], outer)
    except SchedulerError as error:
        print(
            f"hpctrain: Slurm will delay the next start by two minutes: {error}", file=sys.stderr, flush=True
        )


def _leave(heir: LeaseHolder) -> None:
    """Exit at once, which ends the job: another one trains in the folder now."""
    words = (
        f"Job {heir.job_id} has taken over the run because this job was silent for too long; this job ends."
    )
    log.critical(words)
    print(f"Error: {words}", file=sys.stderr, flush=True)
    os._exit(SpecError.exit_code)
