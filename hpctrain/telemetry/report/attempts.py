"""The starts of a run's workers: what each did, how it ended, and what its end cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.telemetry.ledger import Ledger
from hpctrain.telemetry.marks import microseconds
from hpctrain.telemetry.spans import What

VANISHED = "the job was killed, and nobody was left to say why"


@dataclass
class Attempt:
    """One start of the workers. Times are seconds since the epoch."""

    number: int
    started: float
    hosts: list[str] = field(default_factory=list)
    nodes: int | None = None
    world_size: int | None = None
    resumed_step: int | None = None
    """The step of the checkpoint that it went on from."""
    first_step: int | None = None
    last_step: int | None = None
    """The last that it logged."""
    ended: float | None = None
    end: str | None = None
    """`failure`, `stop`, `vanished`, `completed`, `cancelled`, `failed`; None while it goes on."""
    cause: str | None = None
    stopped_for: str | None = None
    """What it was asked to stop for, or who has struck it."""
    rank: int | None = None
    host: str | None = None
    log: str | None = None
    followed_by: str | None = None
    """What came next: `restart`, `requeue`, `successor`, a new `submission`, or nothing."""
    lost_us: int = 0
    """Time in which it trained steps that had to be trained again."""
    away_us: int = 0
    """Time from its end until the next attempt trained: in the queue, starting, loading."""

    @property
    def interrupted(self) -> bool:
        """Whether it ended before the run did."""
        return self.end in ("failure", "stop", "vanished", "failed")


def attempts_of(
    events: Iterable[Mapping[str, Any]], ledger: Ledger, steps: Mapping[int, tuple[int, int]]
) -> list[Attempt]:
    """All attempts of a run, in their order.

    Args:
        events: lines of `events.jsonl`.
        ledger: where the run's time went.
        steps: the first and the last step that each attempt logged.
    """
    attempts: list[Attempt] = []
    for event in events:
        if (time_us := microseconds(event.get("time"))) is not None:
            _take(attempts, event, str(event.get("kind")), time_us / 1e6)
    known = {attempt.number for attempt in attempts}
    for number in sorted(set(steps) - known):
        starts = [span.start_us for span in ledger.spans if span.attempt == number]
        attempts.append(Attempt(number, min(starts, default=0) / 1e6))
    for attempt in attempts:
        attempt.first_step, attempt.last_step = steps.get(attempt.number, (None, None))
    _add_costs(attempts, ledger)
    return attempts


def _take(attempts: list[Attempt], event: Mapping[str, Any], kind: str, time: float) -> None:
    last = attempts[-1] if attempts else None
    if kind == "started":
        if last is not None and last.end is None:
            last.end, last.cause = "vanished", VANISHED
        if last is not None and last.followed_by is None:
            last.followed_by = "requeue"
        attempts.append(_started(event, time, len(attempts)))
    elif last is None:
        return
    elif kind == "resumed":
        last.resumed_step = _whole(event.get("step"))
    elif kind == "failure" and event.get("rank") is not None:
        cause = str(event.get("cause") or "no cause is on record")
        last.ended, last.end, last.cause = time, "failure", ", ".join(filter(None, [cause, last.stopped_for]))
        last.rank, last.host = _whole(event.get("rank")), _text(event.get("host"))
        last.log = _text(event.get("log"))
    elif kind == "grow":
        last.stopped_for = f"to go on with {event.get('nodes')} nodes"
    elif kind == "chaos":
        last.stopped_for = f"by hpctrain chaos ({event.get('fault')})"
    elif kind == "signal":
        reason = f", {last.stopped_for}" if last.stopped_for else ""
        saved = "" if event.get("saved") is True else "; nothing new was saved"
        signal, step = event.get("signal"), event.get("step")
        last.ended, last.end = time, "stop"
        last.cause = f"told to stop{f' by {signal}' if signal else ''} after step {step}{reason}{saved}"
    elif kind in ("restart", "shrink", "replace", "requeue"):
        last.followed_by = _text(event.get("by")) or kind
        if last.end is None:
            last.ended, last.end, last.cause = time, "stop", _text(event.get("cause"))
    elif kind == "submitted" and last.end is not None:
        last.followed_by = last.followed_by or "submission"
    elif kind == "finished":
        _finish(last, event, time)


def _started(event: Mapping[str, Any], time: float, default: int) -> Attempt:
    hosts = event.get("hosts")
    number = _whole(event.get("attempt"))
    return Attempt(
        default if number is None else number,
        time,
        hosts=[str(host) for host in hosts] if isinstance(hosts, list) else [],
        nodes=_whole(event.get("nodes")),
        world_size=_whole(event.get("world_size")),
    )


def _finish(attempt: Attempt, event: Mapping[str, Any], time: float) -> None:
    state = str(event.get("state")).lower()
    if attempt.end is None or state != "failed":
        attempt.ended, attempt.end = time, state
        attempt.cause = _text(event.get("cause")) or attempt.cause


def _add_costs(attempts: Sequence[Attempt], ledger: Ledger) -> None:
    after = {What.QUEUED, What.RESTARTING, What.IDLE}
    before = {What.STARTING, What.LOADING}
    follower = dict(zip((one.number for one in attempts[1:]), attempts, strict=False))
    by_number = {one.number: one for one in attempts}
    for span in ledger.spans:
        us = span.end_us - span.start_us
        attempt = by_number.get(-1 if span.attempt is None else span.attempt)
        if attempt is None:
            continue
        if span.what is What.LOST:
            attempt.lost_us += us
        elif span.what in after and attempt.interrupted:
            attempt.away_us += us
        elif span.what in before and (previous := follower.get(attempt.number)) and previous.interrupted:
            previous.away_us += us


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
