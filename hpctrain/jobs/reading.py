"""The logs and turns of one run, or of one task of a job array, read on from attempt to attempt."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from hpctrain.jobs.error_report import report
from hpctrain.jobs.rank_logs import RankLogs
from hpctrain.jobs.tail import RecordTail
from hpctrain.rundir import RunDir


@dataclass(frozen=True)
class Text:
    """A piece of the logs; whole lines behind their origin where several logs are shown."""

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


class Reading:
    """Reads on in what a run writes."""

    def __init__(self, run: RunDir, shown: Shown, *, whole: bool, label: str = "") -> None:
        """Nothing is read yet.

        Args:
            run: the run.
            shown: what of the logs is wanted.
            whole: start at the last submission, rather than at the newest attempt.
            label: what each line begins with; nothing where the run is shown alone.
        """
        self._run, self._shown, self._whole, self._label = run, shown, whole, label
        self._events = RecordTail(run.events)
        self._logs: _Logs | None = None
        self._news: list[dict[str, Any]] = []
        self._told: list[dict[str, Any]] = []

    @property
    def has_news(self) -> bool:
        """Whether the last look found events that have not been told yet."""
        return bool(self._news)

    def read(self) -> Iterator[Text | Notice]:
        """Yield what is new in the logs, and then the turns of which the look before knew."""
        logs = self._logs or self._begin()
        yield from self._reports() if self._shown.errors else logs.read()
        for event in self._told:
            if line := describe(event):
                yield Notice(f"{self._label}{line}")
        self._told = self._news = self._events.read()

    def read_rest(self) -> Iterator[Text]:
        """Yield what is left of the logs of a run that has ended, lines without an end too."""
        if self._logs is not None and not self._shown.errors:
            yield from self._logs.read_rest()

    def _begin(self) -> _Logs:
        past = list(self._events.read_in_parts())
        start = max((i for i, event in enumerate(past) if event.get("kind") == "submitted"), default=-1) + 1
        first = past[start - 1].get("attempt", 0) if self._whole and start else None
        self._news = past[start:]
        self._told = self._news if self._whole else []
        self._logs = _Logs(self._run, self._shown, first, self._label)
        return self._logs

    def _reports(self) -> Iterator[Text]:
        for event in self._news:
            if event.get("kind") == "failure" and self._shown.attempt in (None, event.get("attempt")):
                lines = report(self._run, event, self._shown.ranks)
                yield Text("".join(f"{self._label}{line}\n" for line in lines))


class _Logs:
    """The logs of the ranks, read on from attempt to attempt."""

    def __init__(self, run: RunDir, shown: Shown, first_attempt: int | None, label: str) -> None:
        self._run, self._shown, self._label = run, shown, label
        self._attempt: int | None = None
        self._logs: RankLogs | None = None
        self._least = first_attempt if first_attempt is not None else max(run.attempts(), default=0)
        if shown.attempt is not None:
            self._least = shown.attempt

    def read(self) -> Iterator[Text]:
        """Yield what is new, the rest of an older attempt before the next one."""
        for attempt in self._run.attempts():
            if attempt < self._least or self._shown.attempt not in (None, attempt):
                continue
            if attempt != self._attempt:
                yield from self.read_rest()
                self._logs = RankLogs(self._run, attempt, self._shown.ranks, self._label)
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
        case "shrink":
            number = f"{event.get('nodes')} of {event.get('nodes_before')} nodes"
            return f"attempt {attempt}: the run goes on with {number} ({event.get('cause')})"
        case "requeue" if event.get("by") == "successor":
            return f"attempt {attempt}: another job is to continue the run"
        case "submitted" if "after" in event:
            return f"attempt {attempt}: job {event['job_id']} continues the run after job {event['after']}"
        case "requeue":
            return f"attempt {attempt}: the job goes back to the queue"
        case "finished" if event.get("note"):
            return f"attempt {attempt}: {event['note']}"
    return None
