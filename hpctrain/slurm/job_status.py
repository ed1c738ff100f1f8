"""Determine the state of the jobs of runs from several sources; each is queried once for all jobs.

squeue is best: it reports the job as it is now, while accounting records (sacct) are delayed and may describe
the submission before a requeue. A job counts as ended only with evidence: its state in squeue, sacct or
scontrol, or a controller without a record of the job, if the run has also been silent for longer than the
controller keeps job records. A query without an answer is not evidence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain import system
from hpctrain.errors import SchedulerError
from hpctrain.slurm.command import is_transient
from hpctrain.slurm.config import query_config
from hpctrain.slurm.job_queries import (
    JobRow,
    JobTable,
    is_job_id,
    parent_job_id,
    query_sacct,
    query_scontrol,
    query_squeue,
)
from hpctrain.slurm.parsing import parse_timestamp
from hpctrain.slurm.states import (
    JobRecord,
    JobStateView,
    RunState,
    base_state,
    combine_views,
    parse_job_state,
)

#: Seconds: a requeued job that starts within a second of its stop fails with "Job credential revoked".
REQUEUE_DELAY_S = 2

#: Job states that a requeue may have followed; accounting records the requeue only later.
_REQUEUABLE_STATES = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")

#: Maximum difference in seconds between the hosts' clocks, and between their times of the same submission.
_CLOCKS_DIFFER_S = 120.0

#: View of an array task that was cancelled while pending.
_REMOVED_VIEW = JobStateView(
    RunState.CANCELLED,
    "cancelled before it started: the task is no longer in Slurm's job array",
    job_state="CANCELLED",
)


_QueryFunction = Callable[[Sequence[str], Mapping[str, str]], JobTable]


def query_jobs(jobs: Sequence[JobRecord], environ: Mapping[str, str]) -> list[JobStateView]:
    """Return Slurm's view of each job; do not raise if Slurm is unreachable."""
    submitted = [job for job in jobs if is_job_id(job.job_id)]
    views, trouble = _listed(submitted, query_squeue, environ)
    if unseen := [job for job in submitted if job not in views]:
        ends = _recorded_ends(unseen, environ)
        sure = {job: view for job, view in ends.items() if view.job_state not in _REQUEUABLE_STATES}
        views |= sure
        if unsure := [job for job in unseen if job not in sure]:
            views |= _by_name(unsure, trouble, ends, environ)
    odd = JobStateView(RunState.UNKNOWN, "the run record contains no Slurm job id")
    return [views.get(job, odd) for job in jobs]


def _listed(
    jobs: Sequence[JobRecord], ask: _QueryFunction, environ: Mapping[str, str]
) -> tuple[dict[JobRecord, JobStateView], str | None]:
    """Return views of the jobs that a source lists, and the error if the source did not respond."""
    try:
        rows = ask([job.job_id for job in jobs], environ) if jobs else JobTable(())
    except SchedulerError as error:
        return {}, str(error)
    # A reinstalled cluster reuses job ids.
    mine = {job: [row for row in rows.rows_of(job.job_id) if _belongs_to_job(row, job)] for job in jobs}
    views = {job: combine_views([row.view() for row in own]) for job, own in mine.items() if own}
    if ask is query_squeue:
        views |= {job: _REMOVED_VIEW for job in jobs if job not in views and _was_removed(job, rows)}
    return views, None


def _was_removed(job: JobRecord, rows: JobTable) -> bool:
    """Return true if a task has never started and is missing from the array that squeue lists."""
    # Pending tasks share one record, from which Slurm removes a cancelled one (seen in 22.05).
    array_id = parent_job_id(job.job_id)
    if array_id == job.job_id or _has_started(job):
        return False
    return any(_belongs_to_job(row, job) for row in rows.rows_of(array_id))


def _has_started(job: JobRecord) -> bool:
    """Return true if the job may have started: it first writes the job log, then the supervisor's log."""
    for path in (job.run.slurm_log, job.run.supervisor_log):
        with suppress(OSError):
            if path.stat().st_mtime > job.submitted - _CLOCKS_DIFFER_S:
                return True
    return False


def _recorded_ends(jobs: Sequence[JobRecord], environ: Mapping[str, str]) -> dict[JobRecord, JobStateView]:
    """Return recorded ends of jobs, from accounting or an earlier status query."""
    ends = {}
    for job in jobs:
        if (observed := job.observed_state) is not None:
            ends[job] = JobStateView(
                parse_job_state(observed), f"Slurm reported {observed}", job_state=base_state(observed)
            )
    # Many clusters have no accounting; the error is ignored.
    recorded, _ = _listed(jobs, query_sacct, environ)
    return ends | {job: view for job, view in recorded.items() if view.state.ended}


def _by_name(
    jobs: Sequence[JobRecord],
    trouble: str | None,
    ends: Mapping[JobRecord, JobStateView],
    environ: Mapping[str, str],
) -> dict[JobRecord, JobStateView]:
    views: dict[JobRecord, JobStateView] = {}
    remembered_s: float | None = None
    # If the controller cannot be reached, a second command would wait again in vain.
    if trouble is None or not is_transient(trouble):
        views, trouble_too = _listed(jobs, query_scontrol, environ)
        trouble = trouble_too and (trouble or f"squeue does not list the job, and {trouble_too}")
        jobs = [job for job in jobs if job not in views]
    if trouble is None and jobs:
        try:
            remembered_s = query_config(environ).min_job_age_s
        except SchedulerError as error:
            trouble = str(error)
    if remembered_s is None:
        for job in jobs:
            words = trouble or ""
            if (end := ends.get(job)) is not None:
                words += (
                    f"; the last known state is {end.job_state}, but the job may have been requeued since"
                )
            views[job] = JobStateView(RunState.UNKNOWN, words)
        return views
    return views | {job: ends.get(job) or _unknown_view(job, remembered_s) for job in jobs}


def _unknown_view(job: JobRecord, remembered_s: float) -> JobStateView:
    """Return the view of a job that is unknown to the controller and has no recorded end."""
    explanation = f"Slurm has no record of job {job.job_id}"
    silent_s = system.time() - max(job.submitted, job.run.last_activity())
    if silent_s > remembered_s:
        return JobStateView(
            RunState.FAILED, f"{explanation}, and the run has not written anything for {silent_s:.0f} s"
        )
    return JobStateView(
        RunState.UNKNOWN,
        f"{explanation}, although Slurm keeps records of finished jobs for {remembered_s:.0f} s. "
        "Check that the run was submitted to this cluster.",
    )


def _belongs_to_job(row: JobRow, job: JobRecord) -> bool:
    """Return true if the job of the row uses the folder of the run or of the run's array."""
    folder = (job.run.array or job.run).path
    if not row.workdir:
        submitted = parse_timestamp(row.submitted_at)
        return submitted is not None and abs(submitted - job.submitted) < _CLOCKS_DIFFER_S
    if Path(row.workdir).name == folder.name:
        return True
    with suppress(OSError, ValueError):  # A path with a NUL raises ValueError.
        return os.path.samefile(row.workdir, folder)
    return False
