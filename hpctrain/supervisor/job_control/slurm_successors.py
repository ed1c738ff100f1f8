"""Continue a run in another Slurm job."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping

from hpctrain import system
from hpctrain.errors import SpecError
from hpctrain.records.lease import Lease, LeaseHolder
from hpctrain.records.successor import JobChanges, find_successor, submit_successor
from hpctrain.rundir import PREDECESSOR_VARIABLE, RunDir
from hpctrain.slurm.environment import own_job_id, strip_job_env
from hpctrain.spec.job_spec import JobSpec

log = logging.getLogger(__name__)


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
        """Submit a job that continues the run after `attempt`, and return its id. This job must then exit.

        Raises:
            SchedulerError: the scheduler refuses, or does not answer.
        """
        with self._submission:
            return submit_successor(
                self._run, self._spec, self._job_id, attempt, self._batch_environ, changes
            )

    def find(self) -> str | None:
        """Return the successor of this job; None if there is none.

        Raises:
            SchedulerError: the scheduler does not answer.
        """
        return find_successor(self._run, self._job_id, self._environ)


def _leave(claimed_by: LeaseHolder) -> None:
    """Exit immediately, which ends the job: another job now trains in the folder."""
    words = (
        f"Job {claimed_by.job_id} has taken over the run because this job was unresponsive for too long. "
        "This job is exiting."
    )
    log.critical(words)
    print(f"Error: {words}", file=sys.stderr, flush=True)
    system.exit_now(SpecError.exit_code)
