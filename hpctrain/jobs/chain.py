"""Successor jobs: a job that gives its place back is continued by another of the same run, by exactly one.

Four things make it exactly one, whoever is killed when (docs/adr/0007-a-successor-is-claimed.md):

- The intent is on record (`handover`) before anything is submitted.
- The successor is called by its predecessor, in a word after the name of its script, by which it is found in
  the queue. Whoever is about to submit one looks for it first.
- It waits for the end of its predecessor (`afterany`), so the two never run at the same time.
- It starts nothing before it has made the file that tells whose turn it is. Of two, one can make it.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Collection, Mapping

from hpctrain.errors import SchedulerError
from hpctrain.jobs.directives import directives_of
from hpctrain.jobs.environment import outer_environment, sbatch_environment
from hpctrain.jobs.record import Record, read_record
from hpctrain.jobs.slurm_command import may_succeed_later, run_slurm
from hpctrain.jobs.spec import JobSpec
from hpctrain.rundir import PREDECESSOR_VARIABLE, RunDir

log = logging.getLogger(__name__)

#: A controller that does not answer is asked again for this long, within the grace of most preemptions.
_PATIENCE_S = 25.0
_PAUSE_S = 1.0

_SEPARATOR = "\x1f"


def hand_on(
    run: RunDir,
    spec: JobSpec,
    job_id: str,
    attempt: int,
    environ: Mapping[str, str],
    left_out: Collection[str] = (),
) -> str:
    """Have another job continue the run after this one, and return its id. To be called in the job itself.

    Args:
        run: the run.
        spec: of the run.
        job_id: this job.
        attempt: the start of the ranks that is to be continued.
        environ: the variables of this job's batch script.
        left_out: nodes on which it is not to start.

    Raises:
        SchedulerError: the scheduler refused, or did not answer in time.
    """
    run.log_event("handover", attempt, job_id=job_id)
    successor = _submit_once(run, spec, job_id, environ, left_out)
    record_successor(run, successor, job_id)
    _move_dependents(job_id, successor, environ)
    if run.cancel_request.exists():
        # Whoever asked for it found this job in the record, and not yet the other.
        run_slurm(["scancel", successor], outer_environment(environ))
    return successor


def find_successor(run: RunDir, job_id: str, environ: Mapping[str, str]) -> str | None:
    """The job that was submitted to continue the run after `job_id`, in whatever state it is.

    Raises:
        SchedulerError: the controller does not answer.
    """
    columns = ("ArrayJobID", "ArrayTaskID", "JobID", "WorkDir", "Command")
    layout = ",".join(f"{name}:0{_SEPARATOR}" for name in columns)
    answer = run_slurm(
        ["squeue", "--noheader", "--all", "--array", "--me", "--states=all", f"--Format={layout}"],
        outer_environment(environ),
    )
    folder = (run.array or run).path
    for line in answer.split("\n"):
        cells = line.split(_SEPARATOR)
        if len(cells) != len(columns) + 1:
            continue
        array_id, task, raw_id, workdir, command, _ = cells
        # Newer Slurms may put the words of the command in quotes.
        if command.strip("'\"").endswith(f" {_marker(job_id)}") and os.path.basename(workdir) == folder.name:
            return f"{array_id}_{task}" if task.isdecimal() else raw_id
    return None


def record_successor(run: RunDir, successor: str, job_id: str) -> None:
    """Write down that `successor` continues the run after `job_id`; from then on the run is that job."""
    attempt = max(run.attempts(), default=-1) + 1
    run.log_event("submitted", attempt, job_id=successor, backend="slurm", after=job_id)


def claim_succession(run: RunDir, job_id: str, predecessor: str) -> str:
    """Take over after `predecessor`, unless another job has done so; return the job that has.

    Raises:
        OSError: the folder cannot be written.
    """
    claim = run.succession(predecessor)
    claim.parent.mkdir(exist_ok=True)
    mine = claim.with_name(f".{claim.name}.{job_id}")
    mine.write_text(job_id, encoding="ascii")
    try:
        # A link appears with what it holds, or not at all, on file systems that other hosts see, too.
        os.link(mine, claim)
    except FileExistsError:
        pass
    finally:
        mine.unlink()
    return claim.read_text(encoding="ascii")


def goes_on_elsewhere(record: Record, environ: Mapping[str, str]) -> bool:
    """Whether a run, of which a job has ended, is continued by another job than the one that `record` names.

    A successor of which its predecessor could not write before it was killed is written down here.
    """
    now = read_record(record.run)
    if now.job_id != record.job_id:
        return True
    if now.handover is None or now.job_id is None:
        return False
    try:
        successor = find_successor(record.run, now.job_id, environ)
        # It may have begun, and have written that down itself, while we were looking for it.
        if successor is not None and read_record(record.run).job_id == now.job_id:
            record_successor(record.run, successor, now.job_id)
    except (SchedulerError, OSError):
        return False  # Nobody answers, or we may not write here: the next look may tell.
    return successor is not None


def _marker(job_id: str) -> str:
    return f"continues-job-{job_id}"


def excluded_nodes(spec: JobSpec, left_out: Collection[str]) -> str:
    """Nodes on which a job is not to start: those that the user excludes, and `left_out`."""
    named = spec.directives.get("exclude")
    return ",".join([*([named] if named else []), *sorted(left_out)])


def can_start_without(
    run: RunDir, spec: JobSpec, left_out: Collection[str], environ: Mapping[str, str]
) -> bool:
    """Whether the scheduler would ever start the run's job on other nodes than these, as `sbatch` tells.

    Not where it does not answer: a run that waits for ever is worse than one that has a node at fault.
    """
    command = ["sbatch", "--test-only", f"--exclude={excluded_nodes(spec, left_out)}"]
    if spec.array_task is not None:
        command.append(f"--array={spec.array_task}")
    command.append(str((run.array or run).job_script))
    try:
        run_slurm(command, sbatch_environment(environ, directives_of(spec)))
    except SchedulerError as error:
        log.info("the job could not start without %s: %s", ", ".join(left_out), error)
        return False
    return True


def _submit_once(
    run: RunDir, spec: JobSpec, job_id: str, environ: Mapping[str, str], left_out: Collection[str]
) -> str:
    """Submit the successor, unless it is there; the answer of the scheduler may have been lost."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return find_successor(run, job_id, environ) or _submit(run, spec, job_id, environ, left_out)
        except SchedulerError as error:
            if not may_succeed_later(str(error)) or time.monotonic() > deadline:
                raise
            log.warning("%s Asking again.", error)
            time.sleep(_PAUSE_S)


def _submit(
    run: RunDir, spec: JobSpec, job_id: str, environ: Mapping[str, str], left_out: Collection[str]
) -> str:
    command = ["sbatch", "--parsable", f"--dependency=afterany:{job_id}"]
    if left_out:
        command.append(f"--exclude={excluded_nodes(spec, left_out)}")
    if "begin" in spec.directives:
        command.append("--begin=now")
    if spec.array_task is not None:
        command.append(f"--array={spec.array_task}")
    command += [str((run.array or run).job_script), _marker(job_id)]
    variables = sbatch_environment(environ, directives_of(spec)) | {PREDECESSOR_VARIABLE: job_id}
    answer = run_slurm(command, variables).strip().splitlines()[-1].split(";")[0]
    if "hold" in spec.directives:
        # It was for the first job, and was released.
        run_slurm(["scontrol", "release", answer], outer_environment(environ))
    return answer if spec.array_task is None else f"{answer}_{spec.array_task}"


def _move_dependents(job_id: str, successor: str, environ: Mapping[str, str]) -> None:
    """Let the user's jobs that wait for the end of this one wait for the end of its successor."""
    outer = outer_environment(environ)
    layout = f"--Format=JobID:0{_SEPARATOR},Dependency:0{_SEPARATOR}"
    try:
        waiting = run_slurm(["squeue", "--noheader", "--me", "--states=PENDING", layout], outer)
        for line in waiting.split("\n"):
            waits, _, dependency = line.rstrip(_SEPARATOR).partition(_SEPARATOR)
            moved = moved_dependency(dependency, job_id, successor)
            if moved and waits != successor.partition("_")[0]:
                run_slurm(["scontrol", "update", f"JobId={waits}", f"Dependency={moved}"], outer)
    except SchedulerError as error:
        log.warning("Jobs that wait for job %s may not wait for job %s: %s", job_id, successor, error)


def moved_dependency(dependency: str, job_id: str, successor: str) -> str | None:
    """What `squeue` says a job waits for, with `successor` for `job_id`; None where that is not in it."""
    separator = "?" if "?" in dependency else ","
    parts = [part.partition("(")[0] for part in dependency.split(separator)]
    moved = [
        part.removesuffix(f":{job_id}") + f":{successor}"
        if part.endswith(f":{job_id}") and part.startswith(("afterany:", "afterok:", "afternotok:"))
        else part
        for part in parts
    ]
    return separator.join(moved) if moved != parts else None
