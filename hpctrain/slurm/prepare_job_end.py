"""Find out how Slurm ends a job, and prepare what follows the end."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime

from hpctrain.errors import EXIT_CONTINUE, SchedulerError
from hpctrain.slurm.config import query_config
from hpctrain.slurm.environment import own_job_id, strip_job_env
from hpctrain.slurm.job_queries import query_job
from hpctrain.slurm.job_requests import update_job
from hpctrain.slurm.parsing import SOON_S

#: Start delay of a requeued job. In this time, the job must end if it has no epilog.
REQUEUE_HOLD_S = 5.0

# As in `slurmstepd-n1: error: *** JOB 1 ON n1 CANCELLED AT 2026-11-21T11:02:09 DUE TO PREEMPTION ***`.
_EVICTED = re.compile(r"\*\*\* (?:JOB|STEP) [^*\n]* DUE TO (?:PREEMPTION|NODE FAILURE)")
#: Causes of a requeue that the supervisor did not request, by Slurm's reason in the log of the job.
_REQUEUE_CAUSES = {
    "JOB REQUEUE": "requeued with `scontrol requeue`, not `hpctrain requeue`",
    "PREEMPTION": "preempted",
    "NODE FAILURE": "a node failed",
}
_REQUEUED = re.compile(rf"\*\*\* (?:JOB|STEP) [^*\n]* AT (\S+) DUE TO ({'|'.join(_REQUEUE_CAUSES)})\b")


def is_evicted(job_log: str) -> bool:
    """Return true if Slurm ended the job permanently for a preemption or a lost node, not by request."""
    return _EVICTED.search(job_log) is not None


def find_requeue(job_log: str, since: float) -> tuple[float, str] | None:
    """Return the time and the cause of a requeue after `since` that the supervisor did not request.

    Times are seconds since the epoch. Returns None if the log has no reason.
    """
    for ended, reason in reversed(_REQUEUED.findall(job_log)):
        with suppress(ValueError, OverflowError):
            # Slurm truncates the time to seconds.
            if (ended_at := datetime.fromisoformat(ended).timestamp()) > since - 1:
                return ended_at, _REQUEUE_CAUSES[reason]
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
