"""Read the attempts of a run: progress, end, and cost of the end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hpctrain.rundir import is_new_submission
from hpctrain.telemetry.accounting.time_breakdown import TimeBreakdown
from hpctrain.telemetry.accounting.timeline_events import TimeCategory, microseconds
from hpctrain.telemetry.startup_parts import StartupDurations, describe_staging
from hpctrain.text import format_duration, is_finite

VANISHED_CAUSE = "the job was killed; cause unknown"
CANCELLED = "cancelled; the job ended before its supervisor recorded the cancellation"

_BETWEEN_ATTEMPTS = {TimeCategory.QUEUED, TimeCategory.RESTARTING, TimeCategory.IDLE}
_BEFORE_TRAINING = {TimeCategory.STARTING, TimeCategory.LOADING}


@dataclass
class Attempt:
    """An attempt. Times are seconds since the epoch."""

    number: int
    started: float
    hosts: list[str] = field(default_factory=list)
    nodes: int | None = None
    world_size: int | None = None
    startup: StartupDurations | None = None
    staged: str | None = None
    """Description of the staging."""
    resumed_step: int | None = None
    """The step of the loaded checkpoint."""
    first_step: int | None = None
    last_step: int | None = None
    """The last logged step."""
    ended: float | None = None
    end: str | None = None
    """`failure`, `stop`, `vanished`, `completed`, `cancelled` or `failed`; None while active."""
    cause: str | None = None
    stopped_for: str | None = None
    """The reason for a requested stop, or the injected fault."""
    rank: int | None = None
    host: str | None = None
    log: str | None = None
    followed_by: str | None = None
    """Next event: `restart`, `requeue`, `successor`, a new `submission`, or nothing."""
    lost_us: int | None = 0
    """Training time that was lost; None if steps are not reported."""
    away_us: int = 0
    """Time from the end of the attempt until the next attempt trained: in the queue, starting, loading."""

    @property
    def interrupted(self) -> bool:
        return self.end in ("failure", "stop", "vanished", "failed")


def read_attempts(
    events: Iterable[Mapping[str, Any]], breakdown: TimeBreakdown, steps: Mapping[int, tuple[int, int]]
) -> list[Attempt]:
    """Return all attempts of a run, in order. `steps` are the first and last logged step of each."""
    attempts: list[Attempt] = []
    job_id: object = None
    for event in events:
        kind = str(event.get("kind"))
        if kind == "submitted":
            job_id = event.get("job_id")
        # Slurm's final state of an earlier job may be recorded late.
        is_late = kind == "seen" and event.get("job_id") != job_id
        if (time_us := microseconds(event.get("time"))) is None or is_late:
            continue
        if kind == "started":
            attempts.append(_start_attempt(attempts, event, time_us / 1e6))
        elif attempts:
            _add_event(attempts[-1], event, kind, time_us / 1e6)
    for number in sorted(set(steps) - {attempt.number for attempt in attempts}):
        starts = [span.start_us for span in breakdown.spans if span.attempt == number]
        attempts.append(Attempt(number, min(starts, default=0) / 1e6))
    for attempt in attempts:
        attempt.first_step, attempt.last_step = steps.get(attempt.number, (None, None))
    _add_costs(attempts, breakdown)
    return attempts


def _start_attempt(attempts: Sequence[Attempt], event: Mapping[str, Any], time: float) -> Attempt:
    if attempts and attempts[-1].end is None:
        attempts[-1].end, attempts[-1].cause = "vanished", VANISHED_CAUSE
    if attempts:
        attempts[-1].followed_by = attempts[-1].followed_by or "requeue"
    number, hosts = _integer(event.get("attempt")), event.get("hosts")
    return Attempt(
        len(attempts) if number is None else number,
        time,
        hosts=[str(host) for host in hosts] if isinstance(hosts, list) else [],
        nodes=_integer(event.get("nodes")),
        world_size=_integer(event.get("world_size")),
    )


def _add_event(attempt: Attempt, event: Mapping[str, Any], kind: str, time: float) -> None:
    reason = f" ({attempt.stopped_for})" if attempt.stopped_for else ""
    if kind == "staged":
        attempt.staged = describe_staging(event)
    elif kind == "startup":
        attempt.startup = StartupDurations.from_event(event)
    elif kind == "resumed":
        attempt.resumed_step = _integer(event.get("step"))
    elif kind == "failure" and event.get("rank") is not None:
        attempt.ended, attempt.end = time, "failure"
        attempt.cause = f"{event.get('cause') or 'cause not recorded'}{reason}"
        attempt.rank, attempt.host = _integer(event.get("rank")), _text(event.get("host"))
        attempt.log = _text(event.get("log"))
    elif kind == "grow":
        attempt.stopped_for = f"requeued to continue on {event.get('nodes')} nodes"
    elif kind == "chaos":
        attempt.stopped_for = f"fault injected by hpctrain chaos: {event.get('fault')}"
    elif kind == "signal":
        saved = "" if event.get("saved") is True else "; no new checkpoint was saved"
        signal = f" by {event['signal']}" if event.get("signal") else ""
        attempt.ended, attempt.end = time, "stop"
        attempt.cause = f"stopped{signal} after step {event.get('step')}{reason}{saved}"
    elif kind in ("restart", "shrink", "replace", "requeue"):
        attempt.followed_by = _text(event.get("by")) or kind
        kind_of_end = _text(event.get("class"))
        if attempt.end is None:
            attempt.ended, attempt.end = time, "stop"
            attempt.cause = _text(event.get("cause")) or kind_of_end
        elif attempt.end == "stop" and kind_of_end == "preempted" and attempt.cause:
            attempt.cause = attempt.cause.replace("stopped", kind_of_end, 1)
    elif kind == "seen" and attempt.followed_by is None:
        state = str(event.get("job_state") or "").partition(" ")[0].rstrip("+")
        if state == "CANCELLED":
            mark_cancelled(attempt)
        elif attempt.end is None:
            attempt.end, attempt.cause = "vanished", f"{VANISHED_CAUSE} (Slurm state: {state})"
    elif kind == "submitted" and attempt.end is not None:
        follow_up = "submission" if is_new_submission(event) else "successor"
        attempt.followed_by = attempt.followed_by or follow_up
    elif kind == "finished":
        state = str(event.get("state")).lower()
        if attempt.end is None or state != "failed":
            attempt.ended, attempt.end = time, state
            attempt.cause = _text(event.get("cause")) or attempt.cause


def mark_cancelled(attempt: Attempt) -> None:
    """Record the cancellation of the run in this attempt, unless its supervisor recorded it."""
    if attempt.end not in ("cancelled", "completed"):
        attempt.end, attempt.cause = "cancelled", attempt.cause or CANCELLED


def _add_costs(attempts: Sequence[Attempt], breakdown: TimeBreakdown) -> None:
    by_number = {attempt.number: attempt for attempt in attempts}
    previous_of = {attempt.number: previous for previous, attempt in pairwise(attempts)}
    if not breakdown.knows_lost_work:
        for attempt in attempts:
            attempt.lost_us = None
    for span in breakdown.spans:
        us = span.end_us - span.start_us
        current = by_number.get(-1 if span.attempt is None else span.attempt)
        if current is None:
            continue
        if span.category is TimeCategory.LOST:
            current.lost_us = (current.lost_us or 0) + us
            continue
        # The time until an attempt trains is the cost of the end of the previous one.
        interrupted = current if span.category in _BETWEEN_ATTEMPTS else previous_of.get(current.number)
        if (
            span.category in _BETWEEN_ATTEMPTS | _BEFORE_TRAINING
            and interrupted is not None
            and interrupted.interrupted
        ):
            interrupted.away_us += us


def describe_straggler(event: Mapping[str, Any]) -> str:
    """Describe a straggler, as far as the event has this data."""
    rank, host, ratio = event.get("rank"), event.get("host"), event.get("ratio")
    text = " on ".join(filter(None, [f"rank {rank}" if is_finite(rank) else "", str(host or "")]))
    if not is_finite(ratio):
        return text
    text = f"{text} takes {ratio:.1f} times as long as other ranks".lstrip()
    activity = {"data": "waiting for data", "compute": "computing"}.get(str(event.get("part")))
    if activity is None:
        return text
    spent = [event.get("seconds"), event.get("typical")]
    times = [durations_s.get(event["part"]) for durations_s in spent if isinstance(durations_s, Mapping)]
    durations = [format_duration(seconds) for seconds in times if is_finite(seconds) and seconds >= 0]
    if len(durations) < 2:
        return f"{text} ({activity})"
    return f"{text} ({activity}: {durations[0]} per step, other ranks {durations[1]})"


def _integer(value: object) -> int | None:
    return value if type(value) is int else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
