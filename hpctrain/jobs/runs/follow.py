"""Live output of a run: its logs across all attempts, and a line for each event."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence

from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.runs.run_log_reader import (
    EventLine,
    LogFilter,
    LogMark,
    LogPosition,
    LogText,
    RunLogReader,
)
from hpctrain.jobs.runs.run_status import RunStatus
from hpctrain.jobs.runs.status_poller import StatusPoller
from hpctrain.jobs.runs.unknown_state import UnknownStateTracker
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.states import RunState
from hpctrain.spec.load_spec import load_spec

_POLL_S = 0.2
#: Tasks of a job array per poll: reading thousands at once would overload the file system.
_TASKS_PER_POLL = 64

#: All logs of all ranks.
ALL_RANKS = LogFilter()


def follow_run(
    run: Run,
    shown: LogFilter = ALL_RANKS,
    *,
    whole: bool,
    positions: Mapping[str, LogPosition] | None = None,
) -> Iterator[LogText | EventLine | LogMark | RunStatus]:
    """Yield logs and events of the run as they are written; the last item is the status of the ended run.

    For a job array, yield those of all tasks with the task's name before each line, and a notice when the
    number of tasks in a state changes.

    Args:
        run: the run.
        shown: the logs to show.
        whole: start at the last submission instead of the newest attempt.
        positions: continue there, by source of the marks.
    """
    readings = deque(_open_readers(run, shown, whole=whole, positions=positions or {}))
    poller, unknown = StatusPoller([run.dir], run.environ), UnknownStateTracker()
    before: RunStatus | None = None
    while True:
        # Query before reading, so that no output before the end is missed.
        status = poller.poll()[0] if poller.is_due else None
        has_ended = status is not None and status.state.ended
        for _ in range(len(readings) if has_ended else min(_TASKS_PER_POLL, len(readings))):
            yield from readings[0].read()
            readings.rotate(-1)
        if status is not None:
            yield from _notices(status, before, unknown)
            before = status
        if status is not None and has_ended and not any(reader.has_new_events for reader in readings):
            for reader in readings:
                yield from reader.read_rest()
            run.await_exit()
            yield status
            return
        time.sleep(_POLL_S)


def _open_readers(
    run: Run, shown: LogFilter, *, whole: bool, positions: Mapping[str, LogPosition]
) -> list[RunLogReader]:
    """Return a reader for the run, or for each task of a job array; `whole` takes those last submitted."""
    tasks: Sequence[int] = run.dir.tasks()
    if not tasks:
        return [RunLogReader(run.dir, shown, whole=whole, position=positions.get(""))]
    if whole:
        # An array resubmitted with other tasks still contains the folders of the earlier tasks.
        tasks = JobArray.parse(load_spec(run.dir.spec).array or "").indices
    width = len(f"[task-{max(tasks)}]")
    labels = {index: f"{f'[task-{index}]':<{width}} " for index in tasks}
    return [
        RunLogReader(run.dir.task(index), shown, whole=whole, label=label, position=positions.get(label))
        for index, label in labels.items()
    ]


def _notices(
    status: RunStatus, before: RunStatus | None, unknown: UnknownStateTracker
) -> Iterator[EventLine]:
    """Yield a line if the state changed or became unknown."""
    if words := unknown.message_for(status):
        yield EventLine(words)
    is_array = status.tasks is not None
    is_new = before is None or before.state is not status.state or (is_array and before.words != status.words)
    if is_new and (is_array or status.state is RunState.PENDING):
        yield EventLine(f"job is {status.state}" + (f" ({status.words})" if status.words else ""))
