"""A run as it happens: its logs across all attempts, with a line for each turn the run takes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

from hpctrain.jobs.array import Array
from hpctrain.jobs.doubt import Doubt
from hpctrain.jobs.reading import Notice, Reading, Shown, Text
from hpctrain.jobs.runs import Run
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.states import RunState
from hpctrain.jobs.status import RunStatus
from hpctrain.jobs.watch import Watcher

_POLL_S = 0.2
#: Tasks of a job array that one look goes through: thousands of them must not keep the file system busy.
_TASKS_A_LOOK = 64

#: All logs of all ranks.
ALL = Shown()


def follow(run: Run, shown: Shown = ALL, *, whole: bool) -> Iterator[Text | Notice | RunStatus]:
    """Yield logs and turns of the run as they come; the last item is the status of the ended run.

    Delays that Slurm puts on the requeued job are lifted on the way. Of a job array, those of all tasks come,
    each line behind the task's name, and a notice whenever the number of tasks in a state changes.

    Args:
        run: the run.
        shown: what of the logs is wanted.
        whole: start at the last submission, rather than at the newest attempt.
    """
    readings = deque(_readings(run, shown, whole=whole))
    watcher = _Watcher(run)
    while True:
        # First the question, then the reading: what was written before the end is not missed.
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


def _readings(run: Run, shown: Shown, *, whole: bool) -> list[Reading]:
    """What to read on in: the run, or the tasks of a job array, from the last submission on those it has."""
    tasks: Sequence[int] = run.dir.tasks()
    if not tasks:
        return [Reading(run.dir, shown, whole=whole)]
    if whole:
        # Submitted again with other tasks, an array still has the folders of the first ones.
        tasks = Array.parse(JobSpec.load(run.dir.spec).array or "").indices
    width = len(f"[task-{max(tasks)}]")
    return [
        Reading(run.dir.task(index), shown, whole=whole, label=f"{f'[task-{index}]':<{width}} ")
        for index in tasks
    ]


class _Watcher:
    """Asks for the status, no more often than burdens nobody, and lifts delays."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._watcher = Watcher([run.dir], run.environ)
        self._next = 0.0
        self._said: tuple[RunState, str] | None = None
        self._doubt = Doubt()
        self._news: list[str] = []

    def look(self) -> RunStatus | None:
        """The status, where it is time to ask."""
        if time.monotonic() < self._next:
            return None
        (status,) = self._watcher.look()
        self._next = time.monotonic() + self._watcher.poll_s
        if words := self._doubt.words(status):
            self._news.append(words)
        says = status.state, status.words if status.tasks is not None else ""
        if says != self._said and (status.tasks is not None or status.state is RunState.PENDING):
            about = f" ({status.words})" if status.words else ""
            self._news.append(f"the job is {status.state}{about}")
        self._said = says
        if status.held and self._run.lift_hold():
            self._news.append("Slurm held the requeued job back for two minutes; the delay is lifted.")
        return status

    def news(self) -> Iterator[Notice]:
        """Yield what has come up since the last call."""
        yield from map(Notice, self._news)
        self._news = []
