"""Submit the successor of a job that releases its allocation, so that exactly one job continues the run.

Four rules guarantee this, regardless of which process is killed at any time
(docs/adr/0007-claim-successor-jobs.md):

- The intent is recorded (`handover`) before anything is submitted.
- The successor's command line names its predecessor in an argument after the script. Every process searches
  the queue for this argument before submitting a successor.
- The successor waits for the end of its predecessor (`afterany`), so the two never run concurrently.
- The successor starts nothing before it has created the claim file, which only one of two jobs can create.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from hpctrain import system
from hpctrain.errors import SchedulerError
from hpctrain.files import create_atomic, make_folder, read_regular
from hpctrain.jobspec.job_directives import directives_after_start, job_directives
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.records.run_record import RunRecord, read_run_record
from hpctrain.rundir import PREDECESSOR_VARIABLE, RunDir
from hpctrain.slurm.command import is_transient, run_slurm
from hpctrain.slurm.environment import sbatch_env, strip_job_env
from hpctrain.slurm.job_queries import queue_cells
from hpctrain.slurm.job_requests import cancel_jobs, submit_job, update_job
from hpctrain.slurm.parsing import parse_timestamp

log = logging.getLogger(__name__)

#: Time to retry an unresponsive controller, within the grace time of most preemptions.
_TIMEOUT_S = 25.0
_PAUSE_S = 1.0


@dataclass(frozen=True)
class JobChanges:
    """Differences between the job that continues a run and the submitted job."""

    excluded_hosts: Collection[str] = ()
    """Nodes to exclude, in addition to the user's."""
    memory: str | None = None
    """sbatch option with the memory to request in MB, such as `mem=96000`."""

    def __bool__(self) -> bool:
        return bool(self.excluded_hosts or self.memory)

    def options(self, spec: JobSpec) -> list[str]:
        """Return the options of sbatch for the changes."""
        options = [f"--exclude={excluded_nodes(spec, self.excluded_hosts)}"] if self.excluded_hosts else []
        return [*options, f"--{self.memory}"] if self.memory else options


def submit_successor(
    run: RunDir, spec: JobSpec, job_id: str, attempt: int, environ: Mapping[str, str], changes: JobChanges
) -> str:
    """Submit the successor of this job, and return its id."""
    run.log_event("handover", attempt, job_id=job_id)
    successor = _submit_once(run, spec, job_id, environ, changes)
    record_successor(run, successor, job_id)
    _prevent_requeue(job_id, strip_job_env(environ))
    _move_dependents(job_id, successor, environ)
    if run.cancel_request.exists():
        # The cancellation was applied to this job, because its successor was not yet recorded.
        cancel_jobs([successor], strip_job_env(environ))
    return successor


def find_successor(run: RunDir, job_id: str, environ: Mapping[str, str]) -> str | None:
    """Return the successor job of `job_id`, in any state, or None."""
    columns = ("ArrayJobID", "ArrayTaskID", "JobID", "WorkDir", "Command")
    options = ["--all", "--array", "--me", "--states=all"]
    folder, marker = (run.array or run).path, run.successor_script(job_id).name
    for array_id, task, raw_id, workdir, command in queue_cells(columns, options, strip_job_env(environ)):
        # Newer Slurm releases may quote the words of the command.
        is_successor = command.strip("'\"").endswith((f"/{marker}", f" {marker}"))
        if is_successor and os.path.basename(workdir) == folder.name:
            return f"{array_id}_{task}" if task.isdecimal() else raw_id
    return None


def record_successor(run: RunDir, successor: str, job_id: str) -> None:
    """Record that `successor` continues the run after `job_id`, and is now the job of the run."""
    attempt = max(run.attempts(), default=-1) + 1
    run.log_event("submitted", attempt, job_id=successor, backend="slurm", after=job_id)


def claim_successor(run: RunDir, job_id: str, predecessor: str) -> str:
    """Claim the run after `predecessor`. Return the job with the claim."""
    claim = run.successor_claim(predecessor)
    create_atomic(claim, job_id.encode("ascii"), job_id)
    return read_regular(claim).decode("ascii", "replace")


def is_continued_by_other_job(record: RunRecord, environ: Mapping[str, str]) -> bool:
    """Record the successor of the ended job in `record`, if necessary; return true if the run has one."""
    newest = read_run_record(record.run)
    if newest.job_id != record.job_id:
        return True
    if newest.handover is None or newest.job_id is None:
        return False
    try:
        successor = find_successor(record.run, newest.job_id, environ)
        # The successor may have started and recorded itself during the query.
        if successor is not None and read_run_record(record.run).job_id == newest.job_id:
            record_successor(record.run, successor, newest.job_id)
    except (SchedulerError, OSError):
        return False  # Slurm does not respond, or the folder is read-only: the next call may succeed.
    return successor is not None


def excluded_nodes(spec: JobSpec, excluded_hosts: Collection[str]) -> str:
    """Return the nodes to exclude from a job: the user's and `excluded_hosts`."""
    return ",".join(filter(None, [spec.directives.get("exclude"), *sorted(excluded_hosts)]))


def can_start(run: RunDir, spec: JobSpec, changes: JobChanges, environ: Mapping[str, str]) -> bool:
    """True if the scheduler could start the run's job with these changes, according to `sbatch`.

    False without a response: a run that pends forever is worse than a run on a faulty node. True if sbatch
    also rejects the unchanged job, such as because the user has submitted too many jobs.
    """
    try:
        _test_job(run, spec, changes, environ)
    except SchedulerError as error:
        options = " ".join(changes.options(spec))
        log.info("according to sbatch, the job cannot start with %s: %s", options, error)
        if is_transient(str(error)):
            return False
        try:
            _test_job(run, spec, JobChanges(), environ)
        except SchedulerError as unchanged_error:
            return not is_transient(str(unchanged_error))
        return False
    return True


def _test_job(run: RunDir, spec: JobSpec, changes: JobChanges, environ: Mapping[str, str]) -> None:
    command = ["sbatch", "--test-only", *changes.options(spec)]
    if spec.array_task is not None:
        command.append(f"--array={spec.array_task}")
    command.append(str((run.array or run).job_script))
    run_slurm(command, sbatch_env(environ, job_directives(spec)))


def _submit_once(
    run: RunDir, spec: JobSpec, job_id: str, environ: Mapping[str, str], changes: JobChanges
) -> str:
    """Submit the successor unless it exists: an earlier response of the scheduler may have been lost."""
    deadline = system.monotonic() + _TIMEOUT_S
    while True:
        try:
            return find_successor(run, job_id, environ) or _submit(run, spec, job_id, environ, changes)
        except SchedulerError as error:
            if not is_transient(str(error)) or system.monotonic() > deadline:
                raise
            log.warning("cannot submit a successor of job %s (%s); retrying", job_id, error)
            system.sleep(_PAUSE_S)


def _submit(run: RunDir, spec: JobSpec, job_id: str, environ: Mapping[str, str], changes: JobChanges) -> str:
    directives = directives_after_start(spec.directives)
    dependency = ",".join(filter(None, [f"afterany:{job_id}", directives.get("dependency")]))
    options = [f"--dependency={dependency}", *changes.options(spec)]
    if "begin" in spec.directives:
        options.append("--begin=now")
    if "deadline" in spec.directives:
        # A relative time, such as now+1day, would be counted from now.
        layout = ["squeue", "--noheader", f"--jobs={job_id}", "--Format=Deadline:0"]
        deadline = run_slurm(layout, strip_job_env(environ)).strip()
        if parse_timestamp(deadline) is not None:
            options.append(f"--deadline={deadline}")
    if spec.array_task is not None:
        options.append(f"--array={spec.array_task}")
    options += _marked_script(run.array or run, job_id)
    variables = sbatch_env(environ, job_directives(spec)) | {PREDECESSOR_VARIABLE: job_id}
    successor = submit_job(options, variables)
    if "hold" in spec.directives:
        # The hold applied to the first job, and was released.
        run_slurm(["scontrol", "release", successor], strip_job_env(environ))
    return successor if spec.array_task is None else f"{successor}_{spec.array_task}"


def _marked_script(run: RunDir, job_id: str) -> list[str]:
    """Return the batch script and an argument, with which `find_successor` finds the job in the queue.

    Slurm 22.05 shows the argument. Slurm 24.11 shows only the path, so it is that of a link.
    """
    link = run.successor_script(job_id)
    try:
        make_folder(link.parent, private=True)
        if not link.is_symlink():
            link.symlink_to(os.path.join("..", run.job_script.name))
    except OSError as error:
        consequence = "two successors may be submitted if Slurm's response is lost"
        log.warning("cannot create %s, so %s: %s", link, consequence, error)
        return [str(run.job_script), link.name]
    return [str(link), link.name]


def _prevent_requeue(job_id: str, outer: Mapping[str, str]) -> None:
    """Prevent a requeue of this job, for which its successor would wait.

    Since Slurm 24.11, a preempted job is requeued even if its script exits within the grace time.
    """
    try:
        update_job([job_id], outer, Requeue="0")
    except SchedulerError as error:
        log.warning("cannot prevent a requeue of job %s, which would delay its successor: %s", job_id, error)


def _move_dependents(job_id: str, successor: str, environ: Mapping[str, str]) -> None:
    """Change the dependencies of the user's other jobs from this job to its successor."""
    outer = strip_job_env(environ)
    options = ["--me", "--states=PENDING"]
    try:
        for waits, dependency in queue_cells(("JobID", "Dependency"), options, outer):
            moved = replace_dependency(dependency, job_id, successor)
            if moved and waits != successor.partition("_")[0]:
                update_job([waits], outer, Dependency=moved)
    except SchedulerError as error:
        problem = "jobs that depend on job %s might not wait for its successor, job %s: %s"
        log.warning(problem, job_id, successor, error)


def replace_dependency(dependency: str, job_id: str, successor: str) -> str | None:
    """Return the dependency with `successor` in place of `job_id`; None if it does not contain that job."""
    jobs = re.sub(r"\([^,?]*", "", dependency)
    pattern = rf"\b(after(?:any|ok|notok)[:\w]*):{re.escape(job_id)}(?=[,?]|$)"
    moved = re.sub(pattern, rf"\1:{successor}", jobs)
    return moved if moved != jobs else None
