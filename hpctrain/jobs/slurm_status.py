"""What Slurm makes of the jobs of runs: several sources, of which each is asked once for all jobs.

The order is squeue, sacct, scontrol. Squeue knows best: it speaks of the job as it is now, where records in
accounting come late and may be of the submission before a requeue. That a job has ended takes evidence: its
state in one of the three, or that the controller denies the job by name and the run has been silent for
longer than the controller remembers jobs. A question without an answer is no evidence of anything.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from hpctrain.errors import SchedulerError
from hpctrain.jobs.reasons import explain
from hpctrain.jobs.record import Job, last_sign_of_life
from hpctrain.jobs.slurm_command import NO_ANSWER
from hpctrain.jobs.slurm_jobs import (
    JobRow,
    JobRows,
    ask_accounting,
    ask_controller,
    ask_queue,
    base_id,
    is_job_id,
    min_job_age_s,
)
from hpctrain.jobs.states import JobView, RunState, first_word, from_slurm, join_views

#: A requeued job that starts within the second in which it was stopped fails with "Job credential revoked".
REQUEUE_PAUSE_S = 2

#: Taken where the controller does not say for how long it remembers jobs; slurm.conf(5), MinJobAge.
_DEFAULT_MIN_JOB_AGE_S = 300.0

#: What the commands say where the controller is out of reach: a second one would only wait again.
_OUT_OF_REACH = ("Unable to contact slurm controller", "Socket timed out", NO_ANSWER)

#: Ends that a requeue may have followed, which accounting hears of later.
_MAY_GO_ON = ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")

#: By how much the clocks of a cluster's hosts may differ, and the moments of a submission on them.
_CLOCKS_DIFFER_S = 120.0

#: A task of an array that was cancelled while it waited.
_TAKEN_OUT = JobView(
    RunState.CANCELLED,
    "it was cancelled before it started: Slurm's array has no such task",
    job_state="CANCELLED",
)

_Ask = Callable[[Sequence[str], Mapping[str, str]], JobRows]


def look(jobs: Sequence[Job], environ: Mapping[str, str]) -> list[JobView]:
    """What Slurm says about each job; never raises because it cannot be reached."""
    asked = [job for job in jobs if is_job_id(job.job_id)]
    views, trouble = _listed(asked, ask_queue, environ)
    if rest := [job for job in asked if job not in views]:
        ends = _recorded_ends(rest, environ)
        sure = {job: view for job, view in ends.items() if view.job_state not in _MAY_GO_ON}
        views |= sure
        if unsure := [job for job in rest if job not in sure]:
            views |= _by_name(unsure, trouble, ends, environ)
    odd = JobView(RunState.UNKNOWN, "the record of the run names no job of Slurm's")
    return [views.get(job, odd) for job in jobs]


def _listed(
    jobs: Sequence[Job], ask: _Ask, environ: Mapping[str, str]
) -> tuple[dict[Job, JobView], str | None]:
    """Views of the jobs that a source lists, and why it gave no answer."""
    try:
        rows = ask([job.job_id for job in jobs], environ) if jobs else JobRows(())
    except SchedulerError as error:
        return {}, str(error)
    mine = {job: _rows_of(job, rows) for job in jobs}
    views = {job: join_views([_view(row) for row in found]) for job, found in mine.items() if found}
    if ask is ask_queue:
        views |= {job: _TAKEN_OUT for job in jobs if job not in views and _was_taken_out(job, rows)}
    return views, None


def _was_taken_out(job: Job, rows: JobRows) -> bool:
    """Whether a task is missing in the array that squeue lists, and has never started.

    All tasks that wait share one record, from which Slurm strikes one that is cancelled (seen in 22.05). It
    keeps no other record of it, not even in accounting. One that has started has a record of its own.
    """
    array_id = base_id(job.job_id)
    if array_id == job.job_id or _has_begun(job):
        return False
    return any(job.by_hand or _is_of(row, job) for row in rows.of(array_id))


def _has_begun(job: Job) -> bool:
    """Whether the job may have started: it begins with its log, and then the supervisor begins one."""
    for path in (job.run.slurm_log, job.run.supervisor_log):
        with suppress(OSError):
            if path.stat().st_mtime > job.submitted - _CLOCKS_DIFFER_S:
                return True
    return False


def _recorded_ends(jobs: Sequence[Job], environ: Mapping[str, str]) -> dict[Job, JobView]:
    """Ends that accounting has on record, or that somebody saw while the controller still knew them."""
    ends = {}
    for job in jobs:
        if (seen := job.seen) is not None:
            ends[job] = JobView(from_slurm(seen), f"Slurm said {seen}", job_state=first_word(seen))
    # Many clusters have no accounting, and its answer is not needed where it has none.
    recorded, _ = _listed(jobs, ask_accounting, environ)
    return ends | {job: view for job, view in recorded.items() if view.state.ended}


def _by_name(
    jobs: Sequence[Job], trouble: str | None, ends: Mapping[Job, JobView], environ: Mapping[str, str]
) -> dict[Job, JobView]:
    """Views of jobs that nobody has listed: the controller is asked whether there are such jobs at all.

    Args:
        jobs: the jobs.
        trouble: why squeue gave no answer, where it gave none.
        ends: what is on record of them, though they may go on.
        environ: variables that Slurm's commands run under.
    """
    views: dict[Job, JobView] = {}
    remembered_s: float | None = None
    if trouble is None or not any(words in trouble for words in _OUT_OF_REACH):
        views, trouble_too = _listed(jobs, ask_controller, environ)
        trouble = trouble_too and (trouble or f"squeue does not list it, and {trouble_too}")
        jobs = [job for job in jobs if job not in views]
    if trouble is None and jobs:
        try:
            remembered_s = min_job_age_s(environ) or _DEFAULT_MIN_JOB_AGE_S
        except SchedulerError as error:
            trouble = str(error)
    if remembered_s is None:
        return views | {job: _unreachable(trouble or "", ends.get(job)) for job in jobs}
    return views | {job: ends.get(job) or _denied(job, remembered_s) for job in jobs}


def _unreachable(trouble: str, end: JobView | None) -> JobView:
    words = f"{trouble}; last, {end.words}, but it may go on" if end is not None else trouble
    return JobView(RunState.UNKNOWN, words)


def _denied(job: Job, remembered_s: float) -> JobView:
    """A job of which the controller says that there is none, and nobody has the end on record.

    Args:
        job: the job.
        remembered_s: for how long the controller remembers a job that has ended.
    """
    words = f"Slurm no longer knows job {job.job_id}"
    silent_s = time.time() - max(job.submitted, last_sign_of_life(job.run))
    if silent_s > remembered_s:
        return JobView(RunState.FAILED, f"{words}, and the run has been silent for {silent_s:.0f} s")
    return JobView(
        RunState.UNKNOWN,
        f"{words}, though it remembers jobs for {remembered_s:.0f} s after their end: "
        "is this the cluster that the run was submitted to?",
    )


def _rows_of(job: Job, rows: JobRows) -> list[JobRow]:
    """The job's rows that are of this run: a cluster that was set up anew counts its jobs from 1 again."""
    return [row for row in rows.of(job.job_id) if job.by_hand or _is_of(row, job)]


def _is_of(row: JobRow, job: Job) -> bool:
    """Whether the row's job runs in the folder of the run, or of the array that the run is a task of.

    The folder may be mounted elsewhere here, or lie behind another link, so its name suffices.
    """
    folder = (job.run.array or job.run).path
    if not row.workdir:
        submitted = timestamp(row.submitted_at)
        return submitted is not None and abs(submitted - job.submitted) < _CLOCKS_DIFFER_S
    if Path(row.workdir).name == folder.name:
        return True
    with suppress(OSError):
        return os.path.samefile(row.workdir, folder)
    return False


def _view(row: JobRow) -> JobView:
    state = from_slurm(row.state)
    job_state = first_word(row.state)
    if state.ended or state is RunState.UNKNOWN:
        return JobView(state, f"Slurm says {row.state}", job_state=job_state)
    # Since 22.05 a requeued job waits two minutes with the reason BeginTime.
    requeued = state is RunState.PENDING and row.reason == "BeginTime" and row.restarts > 0
    held = requeued and not _is_about_to_start(row.eligible_at)
    words = [row.state] if row.state != state else []
    words += [explain(row.reason, row.job_id)] if row.reason else []
    return JobView(state, ", ".join(words), held, job_state)


def _is_about_to_start(eligible_at: str) -> bool:
    """Whether a job's begin time is so near that its hold must have been lifted already."""
    begin = timestamp(eligible_at)
    return begin is not None and begin - time.time() <= 2 * REQUEUE_PAUSE_S


def timestamp(text: str) -> float | None:
    """Seconds since the epoch of a time in Slurm's words, which is this machine's local time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None
