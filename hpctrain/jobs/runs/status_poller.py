"""Status queries: one query per scheduler for all runs, with the last definite answers cached."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from hpctrain.jobs.backends import open_backend
from hpctrain.jobs.runs.run_status import RunStatus, derive_status, summarize_array, unreadable
from hpctrain.records.run_record import RunRecord, read_run_record
from hpctrain.records.successor import is_continued_by_other_job
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import JobStateView, RunState
from hpctrain.spec.job_spec import BackendName

#: Seconds between queries: queries load the shared scheduler; checks of the local lock do not.
_POLL_S: dict[BackendName, float] = {"slurm": 2.0, "local": 0.2}
#: Longest interval in seconds; an unresponsive scheduler is queried less and less often.
_MAX_POLL_S = 30.0


class StatusPoller:
    """Repeated status queries for a list of runs."""

    def __init__(
        self, runs: Sequence[RunDir], environ: Mapping[str, str], *, skip_unreadable: bool = False
    ) -> None:
        """Prepare the poller; nothing is read yet.

        Args:
            runs: the runs.
            environ: environment variables for the schedulers' commands.
            skip_unreadable: report a run whose folder cannot be read as UNKNOWN, instead of raising OSError.
        """
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
        """Return the status of each run, in order; the status of a job array combines its tasks.

        Raises:
            OSError: the folder of a run cannot be read, and `skip_unreadable` is off.
        """
        tasks = {run: self._tasks_of(run) for run in self._runs}
        single = list(dict.fromkeys(each for run in self._runs for each in (tasks[run] or [run])))
        found = dict(zip(single, self._query(single), strict=True))
        if any(status.state is RunState.UNKNOWN and status.job_id for status in found.values()):
            self._poll_s = min(2 * self.poll_s, _MAX_POLL_S)
        else:
            self._poll_s = 0.0
        self._due = time.monotonic() + self.poll_s
        for run in self._runs:
            if tasks[run]:
                with self._noting_unreadable(run, found):
                    found[run] = summarize_array(read_run_record(run), [found[task] for task in tasks[run]])
        return [found[run] for run in self._runs]

    def _tasks_of(self, run: RunDir) -> list[RunDir]:
        try:
            return [run.task(index) for index in run.tasks()]
        except OSError:
            if self._skip_unreadable:
                return []
            raise

    @contextmanager
    def _noting_unreadable(self, run: RunDir, found: dict[RunDir, RunStatus]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._skip_unreadable:
                raise
            found[run] = unreadable(run, error)

    def _query(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        records: list[RunRecord] = []
        found: dict[RunDir, RunStatus] = {}
        for run in runs:
            with self._noting_unreadable(run, found):
                records.append(read_run_record(run))
        self._asks_slurm = any(record.backend == "slurm" for record in records)
        views: dict[RunDir, JobStateView] = {}
        for name in _POLL_S:
            asked = [record for record in records if record.backend == name and record.finished is None]
            if jobs := [record.job for record in asked if record.job]:
                answers = open_backend(name, self._environ).query(jobs)
                for record, view in zip(asked, answers, strict=True):
                    views[record.run] = view
                    self._remember(record, view)
        for record in records:
            run = record.run
            with self._noting_unreadable(run, found):
                found[run] = derive_status(record, views.get(run), self._last_known.get(run, 0.0))
        gone_on = [
            record.run
            for record in records
            if record.backend == "slurm"
            and record.run in views
            and views[record.run].state.ended
            and is_continued_by_other_job(record, self._environ)
        ]
        if gone_on:
            found |= dict(zip(gone_on, self._query(gone_on), strict=True))
        return [found[run] for run in runs]

    def _remember(self, record: RunRecord, view: JobStateView) -> None:
        if view.state is not RunState.UNKNOWN:
            self._last_known[record.run] = time.time()
        seen = record.observed_end["job_state"] if record.observed_end else None
        if view.state.ended and view.job_state not in (None, seen):
            # Record the end: Slurm forgets jobs, and many clusters have no accounting. Only the owner can
            # write it.
            with suppress(OSError):
                attempt = max(record.run.attempts(), default=0)
                record.run.log_event("seen", attempt, job_id=record.job_id, job_state=view.job_state)
