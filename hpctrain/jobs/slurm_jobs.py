"""What Slurm's commands say about jobs: one question for many jobs, a row for each that is known.

All is asked for as text in columns of our choice. The layout of `--json` changes from release to release,
and some releases have none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.array import Array
from hpctrain.jobs.slurm_command import run_slurm

# A control character, which neither a reason nor the path of a run folder may hold.
_SEPARATOR = "\x1f"

_QUEUE_COLUMNS = (
    *("ArrayJobID", "ArrayTaskID", "HetJobID", "HetJobOffset", "JobID"),
    *("State", "RestartCnt", "EligibleTime", "WorkDir", "Reason"),
)
_ACCOUNTING_COLUMNS = ("JobID", "JobIDRaw", "State", "Submit", "WorkDir")

#: The kernel takes 128 KiB in one word (MAX_ARG_STRLEN). More jobs than fit are picked from all there are.
_LONGEST_WORD = 120_000

_JOB_ID = re.compile(r"(\d+)([_+]\d+)?", re.ASCII)
#: Tasks that have not started share a record, `17_[0-3,9%2]`.
_SHARED_ID = re.compile(r"(\d+)_\[(.*)\]", re.ASCII)
#: Has lists of tasks printed whole; otherwise they end in dots after 64 characters.
_WHOLE_LISTS = {"SLURM_BITSTR_LEN": "0"}
_RECORD = re.compile(
    r"^JobId=(?P<raw>\d+)"
    r"(?: ArrayJobId=(?P<array>\d+) ArrayTaskId=(?P<task>\S+))?"
    r"(?: HetJobId=(?P<het>\d+) HetJobOffset=(?P<offset>\d+))?"
)
# Each at the head of a line of its own, where no job name can stand.
_FIELDS = {
    "state": re.compile(r"^ +JobState=(\S+)", re.MULTILINE),
    "reason": re.compile(r"^ +JobState=\S+ Reason=(.*) Dependency=", re.MULTILINE),
    "restarts": re.compile(r"^ +Requeue=\d+ Restarts=(\d+)", re.MULTILINE),
    "eligible_at": re.compile(r"^ +SubmitTime=\S+ EligibleTime=(\S+)", re.MULTILINE),
    "workdir": re.compile(r"^ +WorkDir=(.*)$", re.MULTILINE),
}
_MIN_JOB_AGE = re.compile(r"^MinJobAge\s*=\s*(\d+)", re.MULTILINE)


@dataclass(frozen=True)
class JobRow:
    """One job, task of an array, or component of a heterogeneous job."""

    job_id: str
    """As users name it: `17`, `17_3`, `17+1`."""
    raw_id: str
    """The number that Slurm gave it, which tasks and components have of their own."""
    state: str
    workdir: str
    reason: str = ""
    restarts: int = 0
    eligible_at: str = ""
    submitted_at: str = ""
    """Asked of accounting only, whose first record of a job may lack the folder."""


class JobRows:
    """The answer to a question about jobs."""

    def __init__(self, rows: Iterable[JobRow]) -> None:
        self._by_id: dict[str, list[JobRow]] = {}
        for row in rows:
            for name in {row.job_id, row.raw_id, base_id(row.job_id)}:
                self._by_id.setdefault(name, []).append(row)

    def of(self, job_id: str) -> list[JobRow]:
        """The rows of a job: of an array's or a heterogeneous job's id, all of its parts."""
        rows = self._by_id.get(job_id, [])
        # The number of an array is also the raw number of one of its tasks.
        return [row for row in rows if base_id(row.job_id) == job_id or row.job_id == job_id] or rows


def is_job_id(text: str) -> bool:
    """Whether Slurm's commands take the text for a job: one that they do not take spoils the question."""
    return _JOB_ID.fullmatch(text) is not None


def base_id(job_id: str) -> str:
    """The id of the array or heterogeneous job that a part belongs to; a plain job's is its own."""
    return re.split("[_+]", job_id, maxsplit=1)[0]


def ask_queue(job_ids: Sequence[str], environ: Mapping[str, str]) -> JobRows:
    """What squeue lists: jobs that wait, run, or ended a short time ago, in hidden partitions too.

    Raises:
        SchedulerError: the controller does not answer.
    """
    layout = ",".join(f"{name}:0{_SEPARATOR}" for name in _QUEUE_COLUMNS)
    command = ["squeue", "--noheader", "--all", "--array", "--states=all", f"--Format={layout}"]
    try:
        answer = run_slurm([*command, *_selection(job_ids)], environ)
    except SchedulerError as error:
        # Said of a single job that is not there; of several, it lists the others.
        if "Invalid job id" not in str(error):
            raise
        answer = ""
    return JobRows(_queue_row(cells) for cells in _cells(answer, len(_QUEUE_COLUMNS) + 1))


def ask_accounting(job_ids: Sequence[str], environ: Mapping[str, str]) -> JobRows:
    """What sacct has on record, of each job the newest submission: a requeued job is submitted again.

    Raises:
        SchedulerError: there is no accounting, or it does not answer.
    """
    command = ["sacct", "--allocations", "--noheader", "--parsable2", f"--delimiter={_SEPARATOR}"]
    columns = f"--format={','.join(_ACCOUNTING_COLUMNS)}"
    answer = run_slurm([*command, columns, *_selection(job_ids)], {**environ, **_WHOLE_LISTS})
    newest: dict[str, JobRow] = {}
    shared: dict[str, JobRow] = {}
    for job_id, raw_id, state, submitted_at, workdir in _cells(answer, len(_ACCOUNTING_COLUMNS)):
        found = newest
        names = [job_id]
        if (match := _SHARED_ID.fullmatch(job_id)) is not None:
            found, names = shared, _tasks(match[1], match[2])
        for name in names:
            if name not in found or found[name].submitted_at <= submitted_at:
                found[name] = JobRow(name, raw_id, state, workdir, submitted_at=submitted_at)
    # The record of a task's own is the later one.
    return JobRows((shared | newest).values())


def ask_controller(job_ids: Sequence[str], environ: Mapping[str, str]) -> JobRows:
    """What `scontrol show job` tells: of one job by its name, of several as a part of all there are.

    Raises:
        SchedulerError: the controller does not answer, or answers nothing.
    """
    bases = {base_id(job_id) for job_id in job_ids}
    command = ["scontrol", "--all", "show", "job", *(bases if len(bases) == 1 else ())]
    try:
        answer = run_slurm(command, {**environ, **_WHOLE_LISTS})
    except SchedulerError as error:
        if "Invalid job id" not in str(error):
            raise
        return JobRows(())
    if not answer.strip():
        raise SchedulerError("scontrol answered nothing")
    return JobRows(row for record in answer.split("\n\n") for row in _controller_rows(record))


def min_job_age_s(environ: Mapping[str, str]) -> float | None:
    """For how long the controller remembers a job that has ended; None where the answer does not say.

    Raises:
        SchedulerError: the controller does not answer.
    """
    match = _MIN_JOB_AGE.search(run_slurm(["scontrol", "show", "config"], environ))
    return float(match[1]) if match else None


def _selection(job_ids: Sequence[str]) -> list[str]:
    word = f"--jobs={','.join(sorted({base_id(job_id) for job_id in job_ids}))}"
    return [word] if len(word) <= _LONGEST_WORD else []


def _cells(answer: str, number: int) -> Iterable[list[str]]:
    for line in answer.split("\n"):
        if len(cells := line.split(_SEPARATOR)) == number:
            yield cells


def _queue_row(cells: list[str]) -> JobRow:
    array_id, task, het_id, offset, raw_id, state, restarts, eligible_at, workdir, reason, _ = cells
    if het_id.isdecimal() and het_id != "0":
        job_id = f"{het_id}+{offset}"
    elif task.isdecimal():
        job_id = f"{array_id}_{task}"
    else:
        job_id = raw_id
    count = int(restarts) if restarts.isdecimal() else 0
    return JobRow(job_id, raw_id, state, workdir, "" if reason == "None" else reason, count, eligible_at)


def _controller_rows(record: str) -> Iterable[JobRow]:
    if (head := _RECORD.match(record.lstrip("\n"))) is None:
        return
    found = {name: match[1] if (match := pattern.search(record)) else "" for name, pattern in _FIELDS.items()}
    for job_id in _names(head):
        yield JobRow(
            job_id,
            head["raw"],
            found["state"],
            found["workdir"],
            "" if found["reason"] == "None" else found["reason"],
            int(found["restarts"] or 0),
            found["eligible_at"],
        )


def _names(head: re.Match[str]) -> list[str]:
    if head["het"]:
        return [f"{head['het']}+{head['offset']}"]
    return (head["task"] and _tasks(head["array"], head["task"])) or [head["raw"]]


def _tasks(array_id: str, listed: str) -> list[str]:
    """The names of the tasks in a list of Slurm's; none where it is no list, or was shortened."""
    with suppress(SpecError):
        return [f"{array_id}_{index}" for index in Array.parse(listed).indices]
    return []
