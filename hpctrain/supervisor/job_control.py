"""Control the job of the supervisor: in Slurm, or without a scheduler, as on a laptop."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Collection, Mapping, Sequence

from hpctrain import system
from hpctrain.cluster import expand_hostlist
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.files import file_size, open_regular
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.record_types import LeaseHolder
from hpctrain.records.lease import Lease
from hpctrain.records.log_tail import read_last_lines
from hpctrain.records.submit_successor import (
    JobChanges,
    can_start,
    excluded_nodes,
    find_successor,
    submit_successor,
)
from hpctrain.rundir import BATCH_PID_VARIABLE, PREDECESSOR_VARIABLE, RunDir
from hpctrain.slurm.config import query_config
from hpctrain.slurm.environment import own_job_id, strip_job_env
from hpctrain.slurm.job_queries import query_job, query_seconds_left
from hpctrain.slurm.job_requests import kill_steps, requeue_job, shrink_job, signal_ranks, update_requeued_job
from hpctrain.slurm.node_queries import find_draining_nodes, find_idle_nodes, find_lost_nodes, query_nodes
from hpctrain.slurm.prepare_job_end import find_requeue, is_evicted
from hpctrain.supervisor.policy.job_intent import JobDisposition

log = logging.getLogger(__name__)

#: Slurm's signal before the time limit may come this much early (sbatch(1), --signal).
EARLY_SIGNAL_TOLERANCE_S = 60.0
#: Number of lines of the job log to search for the reason of a requeue.
_LOG_LINES = 1000
#: Variables with the memory of a job, in MB; the option of sbatch and the field of scontrol for each.
_MEMORY_OPTIONS = {
    "SLURM_MEM_PER_NODE": ("mem", "MinMemoryNode"),
    "SLURM_MEM_PER_CPU": ("mem-per-cpu", "MinMemoryCPU"),
}


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
        if spec.program == "batch":
            # Slurm signals the supervisor in place of the batch script.
            numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
            self.on_signal = {number: number for number in numbers}
        self._restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self._log_begin = file_size(run.slurm_log)

    def seconds_left(self) -> float | None:
        """Return the remaining seconds of the job; None if unlimited or unknown."""
        return query_seconds_left(self.job_id, self._environ)

    def disposition(self) -> JobDisposition:
        """Read the job's state, and the reason for its end from its log."""
        job = query_job(self.job_id, self._environ)
        if not job.is_ending:
            return JobDisposition.STAYS
        if job.restarts > self._restarts:
            return JobDisposition.REQUEUED
        return JobDisposition.EVICTED if is_evicted(self._log()) else JobDisposition.ENDS

    def is_preempted(self) -> bool:
        """Return true during the grace time, in which Slurm signals only the job steps."""
        return query_job(self.job_id, self._environ).preempted

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


class SlurmNodes:
    """Nodes of the job. Methods raise SchedulerError if Slurm refuses or does not answer."""

    def __init__(self, run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
        self._run, self._spec, self._batch_environ = run, spec, environ
        self._job_id, self._environ = own_job_id(environ), strip_job_env(environ)
        self.own_host = environ.get("SLURMD_NODENAME", "")

    def lost(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the nodes of the job that can no longer run processes, with the reason."""
        lost = find_lost_nodes(hosts, self._environ)
        lost.pop(self.own_host, None)  # this process runs there
        return lost

    def draining(self, hosts: Sequence[str]) -> dict[str, str]:
        """Return the nodes that will be taken out of service when this job releases them, with the reason."""
        return find_draining_nodes(hosts, self._environ)

    def shrink_to(self, hosts: Sequence[str]) -> None:
        """Release all other nodes of the job, so that their loss does not end the job."""
        shrink_job(self._job_id, hosts, self._environ)

    def can_reallocate(self, excluded_hosts: Collection[str]) -> bool:
        return can_start(self._run, self._spec, JobChanges(excluded_hosts), self._batch_environ)

    def num_free(self, excluded_hosts: Collection[str]) -> int:
        """Return the number of additional nodes that are free and not claimed by waiting jobs."""
        idle = find_idle_nodes(self._batch_environ.get("SLURM_JOB_PARTITION", ""), self._environ)
        excluded = expand_hostlist(self._spec.directives.get("exclude", ""))
        return len(idle.difference(excluded_hosts, excluded))

    def larger_memory(self, hosts: Sequence[str], excluded_hosts: Collection[str]) -> str | None:
        """Return an option of sbatch, such as `mem=96000`, that gives the job more memory on such nodes."""
        environ = self._batch_environ
        variable = next(filter(environ.get, _MEMORY_OPTIONS), None)
        if variable is None:
            return None
        try:
            node_mib = min(node.memory_mib for node in query_nodes(hosts, self._environ))
        except (SchedulerError, ValueError) as error:
            log.warning("cannot determine the memory of the nodes, so no more memory is requested: %s", error)
            return None
        option, current = _MEMORY_OPTIONS[variable][0], int(environ[variable])
        cpus = int(environ.get("SLURM_CPUS_ON_NODE", "1")) if variable == "SLURM_MEM_PER_CPU" else 1
        larger = min(current * 3 // 2, node_mib // cpus)
        changes = JobChanges(excluded_hosts, f"{option}={larger}")
        fits = larger > current and can_start(self._run, self._spec, changes, environ)
        return changes.memory if fits else None

    def change_job(self, changes: JobChanges) -> None:
        fields = {}
        if changes.excluded_hosts:
            fields["ExcNodeList"] = excluded_nodes(self._spec, changes.excluded_hosts)
        if changes.memory:
            option, _, value = changes.memory.partition("=")
            fields[dict(_MEMORY_OPTIONS.values())[option]] = value
        update_requeued_job(self._job_id, self._environ, fields)

    def stop_ranks(self) -> None:
        signal_ranks([self._job_id], signal.SIGTERM, self._environ)

    def kill_steps(self) -> None:
        """End the remaining tasks of a killed supervisor of this job. Waits for a bounded time."""
        kill_steps(self._job_id, self._environ)


class SlurmSuccessors:
    """Earlier starts, predecessor and successor of this job; only one of them holds the lease at a time."""

    def __init__(self, run: RunDir, spec: JobSpec, environ: Mapping[str, str]) -> None:
        self._run, self._spec, self._batch_environ = run, spec, environ
        self._job_id, self._environ = own_job_id(environ), strip_job_env(environ)
        self.predecessor = environ.get(PREDECESSOR_VARIABLE)
        self.restarts = int(environ.get("SLURM_RESTART_COUNT", "0"))
        self.lease = Lease(run, self._job_id, self.restarts, self._environ, _leave)
        # A thread submits, too, if the batch script is killed.
        self._submission = system.Lock()

    def submit(self, attempt: int, changes: JobChanges) -> str:
        """Submit a job that continues the run after `attempt`, and return its id. This job must then exit."""
        environ = self._batch_environ
        with self._submission:
            return submit_successor(self._run, self._spec, self._job_id, attempt, environ, changes)

    def find(self) -> str | None:
        return find_successor(self._run, self._job_id, self._environ)

    def find_requeue(self, since: float) -> tuple[float, str] | None:
        """Return the time and the cause of the requeue of this job, as far as its log contains them."""
        return find_requeue("\n".join(read_last_lines(self._run.slurm_log, _LOG_LINES)), since)


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

    def is_preempted(self) -> bool:
        return False  # This process receives all signals.

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
