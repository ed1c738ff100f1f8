"""Query the status of runs repeatedly, without overloading the scheduler."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from hpctrain.errors import SchedulerError
from hpctrain.jobs.backends import open_backend
from hpctrain.jobs.runs.run_status import RunStatus, derive_status, summarize_array
from hpctrain.jobspec.job_spec import BackendName
from hpctrain.records.run_record import RunRecord, read_run_record
from hpctrain.records.submit_successor import is_continued_by_other_job
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import JobStateView, RunState

#: Seconds between queries, which load the shared scheduler.
_POLL_S: dict[BackendName, float] = {"slurm": 2.0, "local": 0.2}
#: Longest interval in seconds; an unresponsive scheduler is queried less and less often.
_MAX_POLL_S = 30.0
#: Maximum seconds without an answer from the scheduler or new output: a replaced controller never returns.
UNKNOWN_LIMIT_S = 3600.0
#: Seconds between two identical messages.
_MESSAGE_INTERVAL_S = 60.0


class StatusPoller:
    def __init__(
        self, runs: Sequence[RunDir], environ: Mapping[str, str], *, skip_unreadable: bool = False
    ) -> None:
        self._runs = runs
        self._environ = environ
        self._skip_unreadable = skip_unreadable
        self._last_known: dict[RunDir, float] = {}
        self._poll_s = 0.0
        self._asks_slurm = False
        self._due = 0.0

    @property
    def poll_s(self) -> float:
        """Seconds between queries that do not overload the scheduler."""
        return max(self._poll_s, _POLL_S["slurm" if self._asks_slurm else "local"])

    @property
    def is_due(self) -> bool:
        """True once `poll_s` have passed since the last query."""
        return time.monotonic() >= self._due

    def poll(self) -> list[RunStatus]:
        """Return the status of each run, in order; the status of a job array combines its tasks."""
        tasks = {run: self._tasks_of(run) for run in self._runs}
        single = list(dict.fromkeys(job for run in self._runs for job in (tasks[run] or [run])))
        statuses = dict(zip(single, self._query(single), strict=True))
        if any(status.state is RunState.UNKNOWN and status.job_id for status in statuses.values()):
            self._poll_s = min(2 * self.poll_s, _MAX_POLL_S)
        else:
            self._poll_s = 0.0
        self._due = time.monotonic() + self.poll_s
        for run in self._runs:
            if tasks[run]:
                with self._noting_unreadable(run, statuses):
                    statuses[run] = summarize_array(
                        read_run_record(run), [statuses[task] for task in tasks[run]]
                    )
        return [statuses[run] for run in self._runs]

    def _tasks_of(self, run: RunDir) -> list[RunDir]:
        try:
            return [run.task(index) for index in run.tasks()]
        except OSError:
            if self._skip_unreadable:
                return []
            raise

    @contextmanager
    def _noting_unreadable(self, run: RunDir, statuses: dict[RunDir, RunStatus]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._skip_unreadable:
                raise
            problem = f"cannot read {error.filename or run.path}: {error.strerror}"
            statuses[run] = RunStatus(run.run_id, str(run.path), RunState.UNKNOWN, problem)

    def _query(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        records: list[RunRecord] = []
        statuses: dict[RunDir, RunStatus] = {}
        for run in runs:
            with self._noting_unreadable(run, statuses):
                records.append(read_run_record(run))
        self._asks_slurm = any(record.backend == "slurm" for record in records)
        views: dict[RunDir, JobStateView] = {}
        for name in _POLL_S:
            unfinished = [record for record in records if record.backend == name and record.finished is None]
            if jobs := [record.job for record in unfinished if record.job]:
                answers = open_backend(name, self._environ).query(jobs)
                for record, view in zip(unfinished, answers, strict=True):
                    views[record.run] = view
                    self._remember(record, view)
        for record in records:
            run = record.run
            with self._noting_unreadable(run, statuses):
                statuses[run] = derive_status(record, views.get(run), self._last_known.get(run, 0.0))
        gone_on = [
            record.run
            for record in records
            if record.backend == "slurm"
            and record.run in views
            and views[record.run].state.ended
            and is_continued_by_other_job(record, self._environ)
        ]
        if gone_on:
            statuses |= dict(zip(gone_on, self._query(gone_on), strict=True))
        return [statuses[run] for run in runs]

    def _remember(self, record: RunRecord, view: JobStateView) -> None:
        if view.state is not RunState.UNKNOWN:
            self._last_known[record.run] = time.time()
        job_state = record.observed_end.job_state if record.observed_end else None
        if view.state.ended and view.job_state not in (None, job_state):
            # Record the end: Slurm forgets jobs, and many clusters have no accounting. Only the owner can
            # write it.
            with suppress(OSError):
                attempt = max(record.run.attempts(), default=0)
                record.run.log_event("seen", attempt, job_id=record.job_id, job_state=view.job_state)


def describe_unknown(status: RunStatus) -> str:
    """Describe the state, as in `unknown for 35 s (squeue did not respond within 60 s)`."""
    since = "" if status.unknown_s is None else f" for {status.unknown_s:.0f} s"
    return f"unknown{since}" + (f" ({status.words})" if status.words else "")


class UnknownStateTracker:
    """Messages on a run whose state becomes unknown, stays unknown or is available again."""

    def __init__(self, limit_s: float = UNKNOWN_LIMIT_S) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._next = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the limit if nothing changes; infinite unless the state is unknown."""
        return math.inf if self._since is None else max(0.0, self._since + self._limit_s - time.monotonic())

    def message_for(self, status: RunStatus) -> str | None:
        """Return the message for this status; usually None."""
        if status.never_starts:
            raise SchedulerError(
                f"Stopped waiting: run {status.run_id} will never start "
                f"({status.words or 'its dependency can no longer be satisfied'}). Cancel the run, and "
                "submit it again with another --dependency."
            )
        time_s = time.monotonic()
        if status.state is not RunState.UNKNOWN:
            was_unknown, self._since = self._since is not None, None
            return f"the state is available again ({status.state})" if was_unknown else None
        if self._since is None:
            self._since = self._next = time_s
        # A run that still writes is alive, even if the scheduler does not respond.
        if self.left_s == 0 and (status.unknown_s is None or status.unknown_s >= self._limit_s):
            raise SchedulerError(
                f"Stopped waiting for run {status.run_id} after {self._limit_s:g} s (state: "
                f"{describe_unknown(status)}). The run has not written anything, but may still be active. "
                "Check again when the scheduler responds."
            )
        if time_s < self._next:
            return None
        self._next = time_s + _MESSAGE_INTERVAL_S
        return f"the state is {describe_unknown(status)}; this does not affect the run"
