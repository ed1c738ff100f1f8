"""Looking at runs: each scheduler is asked once for all of them, and its last sure answer is remembered."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hpctrain.jobs.backends import open_backend
from hpctrain.jobs.chain import goes_on_elsewhere
from hpctrain.jobs.record import Record, read_record
from hpctrain.jobs.spec import BackendName
from hpctrain.jobs.states import JobView, RunState
from hpctrain.jobs.status import RunStatus, settle, sum_up
from hpctrain.rundir import RunDir

#: Asking a scheduler is not free for others; the local lock is.
_POLL_S: dict[BackendName, float] = {"slurm": 2.0, "local": 0.2}
#: A scheduler that does not answer is asked less and less often, down to once in this time.
_LONGEST_POLL_S = 30.0


class Watcher:
    """Looks at runs as often as one likes."""

    def __init__(self, runs: Sequence[RunDir], environ: Mapping[str, str]) -> None:
        self._runs = runs
        self._environ = environ
        self._last_sure: dict[RunDir, float] = {}
        self._poll_s = 0.0
        self._asks_slurm = False

    @property
    def poll_s(self) -> float:
        """Seconds until the next look that burdens nobody."""
        return max(self._poll_s, _POLL_S["slurm" if self._asks_slurm else "local"])

    def look(self) -> list[RunStatus]:
        """Where the runs stand now, in their order. That of a job array is summed up over its tasks."""
        tasks = {run: [run.task(index) for index in run.tasks()] for run in self._runs}
        single = list(dict.fromkeys(each for run in self._runs for each in (tasks[run] or [run])))
        found = dict(zip(single, self._look(single), strict=True))
        if any(status.state is RunState.UNKNOWN and status.job_id for status in found.values()):
            self._poll_s = min(2 * self.poll_s, _LONGEST_POLL_S)
        else:
            self._poll_s = 0.0
        return [
            sum_up(read_record(run), [found[task] for task in tasks[run]]) if tasks[run] else found[run]
            for run in self._runs
        ]

    def _look(self, runs: Sequence[RunDir]) -> list[RunStatus]:
        records = [read_record(run) for run in runs]
        self._asks_slurm = any(record.backend == "slurm" for record in records)
        views: dict[RunDir, JobView] = {}
        for name in _POLL_S:
            asked = [record for record in records if record.backend == name and record.finished is None]
            if jobs := [record.job for record in asked if record.job]:
                answers = open_backend(name, self._environ).look(jobs)
                for record, view in zip(asked, answers, strict=True):
                    views[record.run] = view
                    self._remember(record, view)
        found = {
            record.run: settle(record, views.get(record.run), self._last_sure.get(record.run, 0.0))
            for record in records
        }
        gone_on = [
            record.run
            for record in records
            if record.backend == "slurm"
            and record.run in views
            and views[record.run].state.ended
            and goes_on_elsewhere(record, self._environ)
        ]
        if gone_on:
            found |= dict(zip(gone_on, self._look(gone_on), strict=True))
        return [found[run] for run in runs]

    def _remember(self, record: Record, view: JobView) -> None:
        if view.state is not RunState.UNKNOWN:
            self._last_sure[record.run] = time.time()
        seen = record.seen["job_state"] if record.seen else None
        if view.state.ended and view.job_state not in (None, seen):
            # Slurm forgets jobs, and many clusters keep no other record. Whoever may not write here does not.
            with suppress(OSError):
                attempt = max(record.run.attempts(), default=0)
                record.run.log_event("seen", attempt, job_id=record.job_id, job_state=view.job_state)
