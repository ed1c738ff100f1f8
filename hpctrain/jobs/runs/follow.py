"""Live output of a run: its logs across all attempts, and a line for each event."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_log_reader import EventLine, LogFilter, LogText, RunLogReader
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.jobs.runs.status_poller import StatusPoller
from hpctrain.jobs.runs.unknown_state import UnknownStateTracker
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.states import RunState
from hpctrain.spec.load_spec import load_spec

_POLL_S = 0.2
#: Tasks of a job array per poll: reading thousands at once would overload the file system.
_TASKS_A_LOOK = 64

#: All logs of all ranks.
ALL_RANKS = LogFilter()


def follow_run(
    run: Run, shown: LogFilter = ALL_RANKS, *, whole: bool
) -> Iterator[LogText | EventLine | RunStatus]:
    """Yield logs and events of the run as they come; the last item is the status of the ended run.

    For a job array, yield those of all tasks with the task's name before each line, and a notice when the
    number of tasks in a state changes.

    Args:
        run: the run.
        shown: the logs to show.
        whole: start at the last submission instead of the newest attempt.
    """
    readings = deque(_readings(run, shown, whole=whole))
    watcher = _Watcher(run)
    while True:
        # Query before reading, so that nothing written before the end is missed.
        status = watcher.look()
        has_ended = status is not None and status.state.ended
        for _ in range(len(readings) if has_ended else min(_TASKS_A_LOOK, len(readings))):
            yield from readings[0].read()
            readings.rotate(-1)
        yield from watcher.news()
        if status is not None and has_ended and not any(reading.has_news for reading in readings):
            for reading in readings:
                yield from reading.read_rest()
            run.await_exit()
            yield status
            return
        time.sleep(_POLL_S)


def _readings(run: Run, shown: LogFilter, *, whole: bool) -> list[RunLogReader]:
    """Return a reader for the run, or for each task of a job array; `whole` takes those last submitted."""
    tasks: Sequence[int] = run.dir.tasks()
    if not tasks:
        return [RunLogReader(run.dir, shown, whole=whole)]
    if whole:
        # An array submitted again with other tasks still has the folders of the first ones.
        tasks = JobArray.parse(load_spec(run.dir.spec).array or "").indices
    width = len(f"[task-{max(tasks)}]")
    return [
        RunLogReader(run.dir.task(index), shown, whole=whole, label=f"{f'[task-{index}]':<{width}} ")
        for index in tasks
    ]


class _Watcher:
    """Status queries at intervals that do not overload the scheduler."""

    def __init__(self, run: Run) -> None:
        self._watcher = StatusPoller([run.dir], run.environ)
        self._next = 0.0
        self._said: tuple[RunState, str] | None = None
        self._doubt = UnknownStateTracker()
        self._news: list[str] = []

    def look(self) -> RunStatus | None:
        """Return the status if it is time to query it again."""
        if time.monotonic() < self._next:
            return None
        (status,) = self._watcher.look()
        self._next = time.monotonic() + self._watcher.poll_s
        if words := self._doubt.words(status):
            self._news.append(words)
        says = status.state, status.words if status.tasks is not None else ""
        if says != self._said and (status.tasks is not None or status.state is RunState.PENDING):
            about = f" ({status.words})" if status.words else ""
            self._news.append(f"job is {status.state}{about}")
        self._said = says
        return status

    def news(self) -> Iterator[EventLine]:
        """Yield the notices since the last call."""
        yield from map(EventLine, self._news)
        self._news = []
