"""A run as it happens: its logs across all attempts, with a line for each turn the run takes."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from hpctrain.jobs.doubt import Doubt
from hpctrain.jobs.error_report import report
from hpctrain.jobs.rank_logs import RankLogs
from hpctrain.jobs.runs import Run
from hpctrain.jobs.states import RunState
from hpctrain.jobs.status import RunStatus
from hpctrain.jobs.tail import RecordTail
from hpctrain.jobs.watch import Watcher

_POLL_S = 0.2


@dataclass(frozen=True)
class Text:
    """A piece of the logs; whole lines with their ranks where several ranks are shown."""

    text: str


@dataclass(frozen=True)
class Notice:
    """One line about the run."""

    line: str


@dataclass(frozen=True)
class Shown:
    """What of the logs is wanted."""

    ranks: Collection[int] = ()
    """Whose; none stands for all."""
    attempt: int | None = None
    """Of which start of the workers; None shows one after the other."""
    errors: bool = False
    """Not the logs, but a report on each failure."""


#: All logs of all ranks.
ALL = Shown()


def follow(run: Run, shown: Shown = ALL, *, whole: bool) -> Iterator[Text | Notice | RunStatus]:
    """Yield logs and turns of the run as they come; the last item is the status of the ended run.

    Delays that Slurm puts on the requeued job are lifted on the way. Of a job array, the turns are changes of
    how many tasks are in which state, and there are no logs.

    Args:
        run: the run.
        shown: what of the logs is wanted.
        whole: start at the last submission, rather than at the newest attempt.
    """
    events = RecordTail(run.dir.events)
    past = list(events.read_in_parts())
    start = max((i for i, event in enumerate(past) if event.get("kind") == "submitted"), default=-1) + 1
    logs = _Logs(run, shown, past[start - 1].get("attempt", 0) if whole and start else None)
    watcher = _Watcher(run)
    news = past[start:]
    told = news if whole else []
    while True:
        # First the question, then the reading: what was written before the end is not missed.
        status = watcher.look()
        yield from _reports(run, shown, news) if shown.errors else logs.read()
        for event in told:
            if line := describe(event):
                yield Notice(line)
        yield from watcher.news()
        told = news = events.read()
        if status is not None and status.state.ended and not news:
            if not shown.errors:
                yield from logs.read_rest()
            run.await_exit()
            yield status
            return
        time.sleep(_POLL_S)


def _reports(run: Run, shown: Shown, events: list[dict[str, Any]]) -> Iterator[Text]:
    for event in events:
        if event.get("kind") == "failure" and shown.attempt in (None, event.get("attempt")):
            yield Text("".join(f"{line}\n" for line in report(run.dir, event, shown.ranks)))


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


class _Logs:
    """The logs of the ranks, read on from attempt to attempt."""

    def __init__(self, run: Run, shown: Shown, first_attempt: int | None) -> None:
        self._run = run
        self._shown = shown
        self._attempt: int | None = None
        self._logs: RankLogs | None = None
        self._least = first_attempt if first_attempt is not None else max(run.dir.attempts(), default=0)
        if shown.attempt is not None:
            self._least = shown.attempt

    def read(self) -> Iterator[Text]:
        """Yield what is new, the rest of an older attempt before the next one."""
        for attempt in self._run.dir.attempts():
            if attempt < self._least or self._shown.attempt not in (None, attempt):
                continue
            if attempt != self._attempt:
                yield from self.read_rest()
                self._logs = RankLogs(self._run.dir, attempt, self._shown.ranks)
                self._attempt = self._least = attempt
                yield from map(Text, self._logs.read_past())
        if self._logs is not None:
            yield from map(Text, self._logs.read_new())

    def read_rest(self) -> Iterator[Text]:
        """Yield what is left of the attempt that was read last."""
        if self._logs is not None:
            yield from map(Text, self._logs.read_rest())


def describe(event: dict[str, Any]) -> str | None:
    """The event as one line; None for what is not worth one."""
    attempt = event.get("attempt")
    match event.get("kind"):
        case "started":
            size = f"world size {event.get('world_size')}, nodes {event.get('nodes')}"
            return f"attempt {attempt}: starting, {size}"
        case "resumed":
            damaged = "".join(f"; {sentence}" for sentence in event.get("broken") or ())
            return f"attempt {attempt}: resumed after step {event.get('step')}{damaged}"
        case "signal":
            saved = (
                "state saved" if event.get("saved") else "nothing new was saved; the checkpoint before counts"
            )
            stop = f"told to stop by {event.get('signal')} after step {event.get('step')}"
            return f"attempt {attempt}: {stop}; {saved}"
        case "failure":
            log = f" (log: {event['log']})" if event.get("log") else ""
            return f"attempt {attempt}: failure: {event.get('cause')}{log}"
        case "restart":
            return f"attempt {attempt}: the workers are started again"
        case "requeue":
            return f"attempt {attempt}: the job goes back to the queue"
        case "finished" if event.get("note"):
            return f"attempt {attempt}: {event['note']}"
    return None
