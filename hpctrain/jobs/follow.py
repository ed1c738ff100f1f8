"""A run as it happens: one rank's log across all attempts, with a line for each turn the run takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpctrain.jobs.doubt import Doubt
from hpctrain.jobs.runs import Run
from hpctrain.jobs.states import RunState
from hpctrain.jobs.status import RunStatus
from hpctrain.jobs.tail import RecordTail, Tail
from hpctrain.jobs.watch import Watcher

_POLL_S = 0.2


@dataclass(frozen=True)
class Text:
    """A piece of the rank's log, as it was written."""

    text: str


@dataclass(frozen=True)
class Notice:
    """One line about the run."""

    line: str


def follow(run: Run, rank: int = 0, *, whole: bool) -> Iterator[Text | Notice | RunStatus]:
    """Yield the rank's log and the run's turns as they come; the last item is the status of the ended run.

    Delays that Slurm puts on the requeued job are lifted on the way.

    Args:
        run: the run.
        rank: whose log.
        whole: start at the last submission, rather than at the newest attempt.
    """
    events = RecordTail(run.dir.events)
    past = events.read()
    start = max((i for i, event in enumerate(past) if event.get("kind") == "submitted"), default=-1) + 1
    logs = _Logs(run, rank, past[start - 1].get("attempt", 0) if whole and start else None)
    watcher = _Watcher(run)
    news = past[start:] if whole else []
    while True:
        # First the question, then the reading: what was written before the end is not missed.
        status = watcher.look()
        yield from logs.read()
        for event in news:
            if line := describe(event):
                yield Notice(line)
        if watcher.lifted:
            watcher.lifted = False
            yield Notice("Slurm held the requeued job back for two minutes; the delay is lifted.")
        if watcher.news:
            yield Notice(watcher.news)
            watcher.news = ""
        news = events.read()
        if status is not None and status.state.ended and not news:
            yield from logs.read()
            run.await_exit()
            yield status
            return
        time.sleep(_POLL_S)


class _Watcher:
    """Asks for the status, no more often than burdens nobody, and lifts delays."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._watcher = Watcher([run.dir], run.environ)
        self._next = 0.0
        self._state: RunState | None = None
        self._doubt = Doubt()
        self.lifted = False
        self.news = ""

    def look(self) -> RunStatus | None:
        """The status, where it is time to ask."""
        if time.monotonic() < self._next:
            return None
        (status,) = self._watcher.look()
        self._next = time.monotonic() + self._watcher.poll_s
        if status.state is not self._state and status.state is RunState.PENDING:
            self.news = f"the job is {status.state}" + (f" ({status.words})" if status.words else "")
        elif words := self._doubt.words(status):
            self.news = words
        self._state = status.state
        if status.held:
            self.lifted = self._run.lift_hold()
        return status


class _Logs:
    """One rank's logs, read on from attempt to attempt."""

    def __init__(self, run: Run, rank: int, first_attempt: int | None) -> None:
        self._run = run
        self._rank = rank
        self._attempt: int | None = None
        self._least = first_attempt if first_attempt is not None else max(run.dir.attempts(), default=0)
        self._tail: Tail | None = None

    def read(self) -> Iterator[Text]:
        """Yield what is new, the rest of an older attempt before the next one."""
        attempts = [number for number in self._run.dir.attempts() if number >= self._least]
        for attempt in attempts:
            if attempt != self._attempt:
                self._tail = Tail(self._run.dir.rank_log(attempt, self._rank))
                self._attempt = self._least = attempt
            assert self._tail is not None
            while text := self._tail.read():
                yield Text(text)


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
    return None
