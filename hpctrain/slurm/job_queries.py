"""Query jobs with Slurm's commands: one call for many jobs, one row for each listed job.

All output is requested as text in fixed columns. The layout of `--json` changes between releases, and some
releases lack it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from hpctrain import system
from hpctrain.errors import SchedulerError, SpecError
from hpctrain.slurm.command import COMMAND_LIMIT_S, CommandKilled, run_slurm
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.parsing import SOON_S, parse_duration, parse_number, parse_timestamp
from hpctrain.slurm.pending_reasons import explain_reason
from hpctrain.slurm.states import JobStateView, RunState, base_state, parse_job_state

# A control character, which neither a reason nor the path of a run folder may contain.
_SEPARATOR = "\x1f"

_QUEUE_COLUMNS = (
    *("ArrayJobID", "ArrayTaskID", "HetJobID", "HetJobOffset", "JobID"),
    *("State", "RestartCnt", "EligibleTime", "WorkDir", "Reason"),
)
_ACCOUNTING_COLUMNS = ("JobID", "JobIDRaw", "State", "Submit", "WorkDir")

_DELAYED = "BeginTime: waiting for its start time; Slurm delays requeued jobs by 2 minutes"

#: The kernel accepts 128 KiB per argument (MAX_ARG_STRLEN). If the ids do not fit, all jobs are queried.
_MAX_WORD = 120_000

_JOB_ID = re.compile(r"(\d+)([_+]\d+)?", re.ASCII)
#: Pending tasks share a record, `17_[0-3,9%2]`.
_SHARED_ID = re.compile(r"(\d+)_\[(.*)\]", re.ASCII)
#: A query of a job in itself is repeated if Slurm's signal to the job also kills the query.
_TRIES, _PAUSE_S = 3, 0.5
#: No time left, in any notation.
_ZERO = re.compile(r"[0:-]*0[0:-]*")
#: Print task lists in full; otherwise, they are truncated after 64 characters.
_FULL_TASK_LISTS = {"SLURM_BITSTR_LEN": "0"}
_RECORD = re.compile(
    r"^JobId=(?P<raw>\d+)"
    r"(?: ArrayJobId=(?P<array>\d+) ArrayTaskId=(?P<task>\S+))?"
    r"(?: HetJobId=(?P<het>\d+) HetJobOffset=(?P<offset>\d+))?"
)
# Anchored at the start of a line, where no job name can appear.
_FIELDS = {
    "state": re.compile(r"^ +JobState=(\S+)", re.MULTILINE),
    "requeue": re.compile(r"^ +Requeue=(\d)", re.MULTILINE),
    "preempted": re.compile(r"^ +PreemptEligibleTime=\S+ PreemptTime=(\d\S*)", re.MULTILINE),
    "suspended": re.compile(r"^ +SuspendTime=(\d\S*)", re.MULTILINE),
    "expedited": re.compile(r"^ +ExpeditedRequeue=(Yes)", re.MULTILINE),
    "reason": re.compile(r"^ +JobState=\S+ Reason=(.*) Dependency=", re.MULTILINE),
    "restarts": re.compile(r"^ +Requeue=\d+ Restarts=(\d+)", re.MULTILINE),
    "submitted_at": re.compile(r"^ +SubmitTime=(\S+)", re.MULTILINE),
    "eligible_at": re.compile(r"^ +SubmitTime=\S+ EligibleTime=(\S+)", re.MULTILINE),
    "workdir": re.compile(r"^ +WorkDir=(.*)$", re.MULTILINE),
}


@dataclass(frozen=True)
class JobRow:
    """One job, task of an array, or component of a heterogeneous job."""

    job_id: str
    """The user-visible id: `17`, `17_3`, `17+1`."""
    raw_id: str
    """Slurm's internal number, unique for each task and component."""
    state: str
    workdir: str
    reason: str = ""
    restarts: int = 0
    eligible_at: str = ""
    submitted_at: str = ""
    """Not set by squeue. The first record of a job in accounting may lack the folder."""
    requeues: bool = True
    """False if the job was submitted with `--no-requeue`; only set by the controller."""
    expedited: bool = False
    """True if the job was submitted with `--requeue=expedite`; only set by the controller."""
    preempted: bool = False
    """True in the grace time of a preemption; only set by the controller."""

    @property
    def is_ending(self) -> bool:
        """True if Slurm is ending the job: COMPLETING until the last process has exited (seen with 22.05)."""
        return self.state not in ("", "RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING")

    def view(self) -> JobStateView:
        state, job_state = parse_job_state(self.state), base_state(self.state)
        if state.ended or state is RunState.UNKNOWN:
            return JobStateView(state, f"Slurm reports {self.state}", job_state=job_state)
        is_requeued = state is RunState.PENDING and self.reason == "BeginTime" and self.restarts > 0
        begin = parse_timestamp(self.eligible_at)
        # If the job begins soon, the delay does not matter.
        held = is_requeued and (begin is None or begin - system.time() > SOON_S)
        details = [self.state] if self.state != state else []
        details += [_DELAYED if held else explain_reason(self.reason, self.job_id)] if self.reason else []
        return JobStateView(state, ", ".join(details), held, job_state)


class JobTable:
    """Rows of a query, indexed by job id."""

    def __init__(self, rows: Iterable[JobRow]) -> None:
        self._by_id: dict[str, list[JobRow]] = {}
        for row in rows:
            for name in {row.job_id, row.raw_id, parent_job_id(row.job_id)}:
                self._by_id.setdefault(name, []).append(row)

    def rows_of(self, job_id: str) -> list[JobRow]:
        """Return the rows of a job; all parts if it is an array or a heterogeneous job."""
        rows = self._by_id.get(job_id, [])
        # The id of an array is also the raw id of one of its tasks.
        return [row for row in rows if parent_job_id(row.job_id) == job_id or row.job_id == job_id] or rows


def is_job_id(text: str) -> bool:
    """Return true if Slurm's commands accept the text as a job id. An invalid id makes the query fail."""
    return _JOB_ID.fullmatch(text) is not None


def parent_job_id(job_id: str) -> str:
    """Return the id of the array or heterogeneous job that contains the job, otherwise its own id."""
    return re.split("[_+]", job_id, maxsplit=1)[0]


def query_squeue(job_ids: Sequence[str], environ: Mapping[str, str]) -> JobTable:
    """Query squeue: pending, running and recently ended jobs, also in hidden partitions."""
    options = ["--all", "--array", "--states=all", *_selection(job_ids)]
    try:
        return JobTable(map(_queue_row, queue_cells(_QUEUE_COLUMNS, options, environ)))
    except SchedulerError as error:
        # Reported only for a query of a single unknown job; otherwise, squeue lists the known jobs.
        if "Invalid job id" not in str(error):
            raise
        return JobTable(())


def queue_cells(
    columns: Sequence[str], options: Sequence[str], environ: Mapping[str, str]
) -> list[list[str]]:
    """Return the cells of each job that squeue lists with these options."""
    layout = ",".join(f"{name}:0{_SEPARATOR}" for name in columns)
    output = run_slurm(["squeue", "--noheader", *options, f"--Format={layout}"], environ)
    return [cells[:-1] for cells in _cells(output, len(columns) + 1)]


def query_sacct(job_ids: Sequence[str], environ: Mapping[str, str]) -> JobTable:
    """Query sacct for the newest submission of each job. A requeue counts as another submission."""
    command = ["sacct", "--allocations", "--noheader", "--parsable2", f"--delimiter={_SEPARATOR}"]
    columns = f"--format={','.join(_ACCOUNTING_COLUMNS)}"
    output = run_slurm([*command, columns, *_selection(job_ids)], {**environ, **_FULL_TASK_LISTS})
    newest: dict[str, JobRow] = {}
    shared: dict[str, JobRow] = {}
    for job_id, raw_id, state, submitted_at, workdir in _cells(output, len(_ACCOUNTING_COLUMNS)):
        rows_of_job = newest
        names = [job_id]
        if (match := _SHARED_ID.fullmatch(job_id)) is not None:
            rows_of_job, names = shared, _tasks(match[1], match[2])
        for name in names:
            if name not in rows_of_job or rows_of_job[name].submitted_at <= submitted_at:
                rows_of_job[name] = JobRow(name, raw_id, state, workdir, submitted_at=submitted_at)
    # The record of a task is newer than the shared record.
    return JobTable((shared | newest).values())


def query_scontrol(job_ids: Sequence[str], environ: Mapping[str, str]) -> JobTable:
    """Query `scontrol show job`: by id for a single job, otherwise for all jobs."""
    bases = {parent_job_id(job_id) for job_id in job_ids}
    command = ["scontrol", "--all", "show", "job", *(bases if len(bases) == 1 else ())]
    try:
        output = run_slurm(command, {**environ, **_FULL_TASK_LISTS})
    except SchedulerError as error:
        if "Invalid job id" not in str(error):
            raise
        return JobTable(())
    if not output.strip():
        raise SchedulerError("scontrol returned no output")
    return JobTable(_parse_records(output))


def query_job(job_id: str, environ: Mapping[str, str], timeout_s: float = COMMAND_LIMIT_S) -> JobRow:
    """Return the controller's record of one job, or of one task of an array."""
    command = ["scontrol", "--all", "show", "job", job_id]
    for tries_left in reversed(range(_TRIES)):
        try:
            output = run_slurm(command, environ, timeout_s=timeout_s)
            break
        except CommandKilled:
            if not tries_left:
                raise
            system.sleep(_PAUSE_S)
    rows = _parse_records(output)
    if (row := next(rows, None)) is None:
        raise SchedulerError(f"scontrol returned no record of job {job_id}")
    return row


def query_seconds_left(job_id: str, environ: Mapping[str, str]) -> float | None:
    """Return the remaining seconds of a running job; None if unlimited or unknown."""
    text = run_slurm(["squeue", "--noheader", f"--jobs={job_id}", "--format=%L"], environ).strip()
    if text == "INVALID" or _ZERO.fullmatch(text):
        return 0.0  # past the limit, which a site may tolerate for some time
    try:
        return parse_duration(text)
    except SpecError:
        return None  # NOT_SET


def _selection(job_ids: Sequence[str]) -> list[str]:
    option = f"--jobs={','.join(sorted({parent_job_id(job_id) for job_id in job_ids}))}"
    return [option] if len(option) <= _MAX_WORD else []


def _cells(output: str, number: int) -> Iterable[list[str]]:
    for line in output.split("\n"):
        if len(cells := line.split(_SEPARATOR)) == number:
            yield cells


def _queue_row(cells: list[str]) -> JobRow:
    array_id, task, het_id, offset, raw_id, state, restarts, eligible_at, workdir, reason = cells
    if het_id.isdecimal() and het_id != "0":
        job_id = f"{het_id}+{offset}"
    elif task.isdecimal():
        job_id = f"{array_id}_{task}"
    else:
        job_id = raw_id
    reason = "" if reason == "None" else reason
    return JobRow(job_id, raw_id, state, workdir, reason, parse_number(restarts) or 0, eligible_at)


def _parse_records(output: str) -> Iterator[JobRow]:
    for record in output.split("\n\n"):
        if (head := _RECORD.match(record.lstrip("\n"))) is None:
            continue
        values = {
            name: match[1] if (match := pattern.search(record)) else "" for name, pattern in _FIELDS.items()
        }
        for job_id in _names(head):
            yield JobRow(
                job_id,
                head["raw"],
                values["state"],
                values["workdir"],
                "" if values["reason"] == "None" else values["reason"],
                parse_number(values["restarts"]) or 0,
                values["eligible_at"],
                values["submitted_at"],
                values["requeue"] != "0",
                bool(values["expedited"]),
                # A job that is suspended for another has both times, also after it is resumed.
                values["suspended"] < values["preempted"],
            )


def _names(head: re.Match[str]) -> list[str]:
    if head["het"]:
        return [f"{head['het']}+{head['offset']}"]
    return (head["task"] and _tasks(head["array"], head["task"])) or [head["raw"]]


def _tasks(array_id: str, listed: str) -> list[str]:
    """Return the ids of the tasks in a Slurm list; empty if the list is invalid or truncated."""
    with suppress(SpecError):
        return [f"{array_id}_{index}" for index in JobArray.parse(listed).indices]
    return []
