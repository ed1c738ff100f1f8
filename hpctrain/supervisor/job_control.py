"""Control the job of the supervisor: in Slurm, or without a scheduler, as on a laptop."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Mapping

from hpctrain import system
from hpctrain.errors import EXIT_CONTINUE, SchedulerError, SpecError
from hpctrain.files import file_size, open_regular
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.restart_policy import REQUEUE_HOLD_S
from hpctrain.records.lease import Lease
from hpctrain.records.successor import JobChanges, find_successor, submit_successor
from hpctrain.rundir import BATCH_PID_VARIABLE, PREDECESSOR_VARIABLE, RunDir
from hpctrain.schema import LeaseHolder
from hpctrain.slurm.command import run_slurm
from hpctrain.slurm.config import query_config
from hpctrain.slurm.duration import parse_duration
from hpctrain.slurm.environment import own_job_id, strip_job_env
from hpctrain.slurm.job_queries import query_job
from hpctrain.slurm.job_requests import requeue_job, update_job
from hpctrain.slurm.parsing import SOON_S
from hpctrain.supervisor.policy.job_intent import JobDisposition
from hpctrain.supervisor.slurm_nodes import SlurmNodes

# As in `slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-21T11:02:09 DUE TO PREEMPTION ***`.
_EVICTED = re.compile(r"\*\*\* (?:JOB|STEP) [^*\n]* DUE TO (?:PREEMPTION|NODE FAILURE)")

#: States of a job that Slurm is not ending.
_CONTINUES = ("", "RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING")
#: No time left, in any notation.
_ZERO = re.compile(r"[0:-]*0[0:-]*")

log = logging.getLogger(__name__)

#: Slurm's signal before the time limit may come this much early (sbatch(1), --signal).
EARLY_SIGNAL_TOLERANCE_S = 60.0


class SlurmJobControl:
    """The job of this batch script. Methods raise SchedulerError if Slurm refuses or does not answer."""

    #: Monotonic time at which the supervisor must end the job; None because Slurm ends it.
    ends_job_at: float | None = None
    #: Signals to the supervisor, each with the signal to forward to the ranks. Slurm signals the steps
    #: itself; a SIGTERM to the batch script means that Slurm is ending the job.
    on_signal: Mapping[signal.Signals, signal.Signals | None] = {signal.SIGTERM: None}
    #: Signals from the user, not the scheduler, that end the job.
    cancel_signals: frozenset[signal.Signals] = frozenset()

    def __init__(self, run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
        self.job_id = own_job_id(environ)
        self.nodes = SlurmNodes(run, spec, environ)
        self.successors = SlurmSuccessors(run, spec, environ)
        self._run, self._environ = run, strip_job_env(environ)
        self._restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self._log_begin = file_size(run.slurm_log)

    def seconds_left(self) -> float | None:
        """Return the remaining seconds of the job; None if unlimited or unknown."""
        command = ["squeue", "--noheader", f"--jobs={self.job_id}", "--format=%L"]
        text = run_slurm(command, self._environ).strip()
        if text == "INVALID" or _ZERO.fullmatch(text):
            return 0.0  # past the limit, which a site may tolerate for some time
        try:
            return parse_duration(text)
        except SpecError:
            return None  # NOT_SET

    def disposition(self) -> JobDisposition:
        """Read the job's state, and the reason for its end from its log.

        For any cause, the state is COMPLETING until the last process has exited (seen with Slurm 22.05).
        """
        job = query_job(self.job_id, self._environ)
        if job.state in _CONTINUES:
            return JobDisposition.STAYS
        if job.restarts > self._restarts:
            return JobDisposition.REQUEUED
        return JobDisposition.EVICTED if _EVICTED.search(self._log()) else JobDisposition.ENDS

    def requeue(self) -> bool:
        """Requeue the job. Return true if this process will be ended, false if the run continues in it."""
        requeue_job(self.job_id, self._environ)
        return True

    def can_requeue(self) -> bool:
        return query_job(self.job_id, self._environ).requeues and query_config(self._environ).job_requeue

    def _log(self) -> str:
        try:
            with open_regular(self._run.slurm_log) as log:
                log.seek(self._log_begin)
                return log.read().decode(errors="replace")
        except OSError:
            return ""


class SlurmSuccessors:
    """The predecessor and the successor of this job, of which only one holds the lease at a time."""

    def __init__(self, run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
        self._run, self._spec, self._batch_environ = run, spec, environ
        self._job_id, self._environ = own_job_id(environ), strip_job_env(environ)
        self.predecessor = environ.get(PREDECESSOR_VARIABLE)
        restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self.lease = Lease(run, self._job_id, restarts, self._environ, _leave)
        # A thread submits, too, if the batch script is killed.
        self._submission = system.Lock()

    def submit(self, attempt: int, changes: JobChanges) -> str:
        """Submit a job that continues the run after `attempt`, and return its id. This job must then exit."""
        with self._submission:
            return submit_successor(
                self._run, self._spec, self._job_id, attempt, self._batch_environ, changes
            )

    def find(self) -> str | None:
        return find_successor(self._run, self._job_id, self._environ)


def _leave(claimed_by: LeaseHolder) -> None:
    """Exit immediately, which ends the job: another job now trains in the folder."""
    message = (
        f"Job {claimed_by.job_id} has taken over the run because this job was unresponsive for too long. "
        "This job is exiting."
    )
    log.critical(message)
    print(f"Error: {message}", file=sys.stderr, flush=True)
    system.exit_now(SpecError.exit_code)


class LocalJobControl:
    """Substitute for the scheduler: the time limit, preemption by SIGUSR2, the user's SIGTERM."""

    on_signal: Mapping[signal.Signals, signal.Signals | None] = {
        signal.SIGUSR2: signal.SIGTERM,
        signal.SIGTERM: signal.SIGTERM,
        signal.SIGINT: signal.SIGTERM,
    }
    cancel_signals = frozenset({signal.SIGTERM, signal.SIGINT})
    nodes = successors = None

    def __init__(self, spec: JobSpec, environ: Mapping[str, str]) -> None:
        batch_pid, index = environ.get(BATCH_PID_VARIABLE), spec.array_task
        self.job_id = (
            batch_pid or str(system.getpid()) if index is None else f"{batch_pid or os.getppid()}_{index}"
        )
        self._limit_s = spec.time_limit_s
        self._started_at = system.monotonic()

    @property
    def ends_job_at(self) -> float | None:
        return None if self._limit_s is None else self._started_at + self._limit_s

    def seconds_left(self) -> float | None:
        return None if self.ends_job_at is None else self.ends_job_at - system.monotonic()

    def disposition(self) -> JobDisposition:
        return JobDisposition.STAYS  # Only the user ends a local job.

    def requeue(self) -> bool:
        """Restart the job immediately in this process, with the full time limit: there is no queue."""
        self._started_at = system.monotonic()
        return False

    def can_requeue(self) -> bool:
        return True


JobControl = LocalJobControl | SlurmJobControl


def known_seconds_left(job: JobControl) -> float | None:
    """Return the remaining seconds of the job; None if unlimited or unknown, or without a response."""
    try:
        return job.seconds_left()
    except SchedulerError as error:
        log.warning("cannot determine this job's remaining time (%s); assuming that enough remains", error)
        return None


def prepare_job_end(environ: Mapping[str, str], exit_code: int) -> None:
    """Give a requeued job an early start time, and prevent the requeue of an ended run. Call this last.

    Slurm delays a requeued job by two minutes after its last process and its epilog have ended. An explicit
    later start time of the job replaces that delay (`batch_requeue_fini`).

    Slurm may requeue a job although its run has ended. In these cases, this function disables the requeue:

    - A job with `--requeue=expedite` is not delayed. But if its script fails, Slurm 26.05 requeues the job
      and holds it until a user releases it.
    - Before 26.05, a job that was warned of a preemption is also requeued when its next start completes.
    """
    earlier_restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
    if not exit_code and not earlier_restarts:
        return
    job_id, outer = own_job_id(environ), strip_job_env(environ)
    try:
        job = query_job(job_id, outer)
        is_requeued = job.restarts > earlier_restarts
        has_restarted_and_ended = earlier_restarts > 0 and exit_code != EXIT_CONTINUE
        if is_requeued and not job.expedited:
            delay_s = SOON_S if query_config(outer).has_epilog else int(REQUEUE_HOLD_S)
            update_job([job_id], outer, until_killed=True, StartTime=f"now+{delay_s}")
        elif not is_requeued and (job.expedited or has_restarted_and_ended):
            update_job([job_id], outer, until_killed=True, Requeue="0")
    except SchedulerError as error:
        consequence = "Slurm may delay the requeued job, or requeue the job although the run has ended"
        message = f"hpctrain: cannot update this job before its end, so {consequence}: {error}"
        print(message, file=sys.stderr, flush=True)
