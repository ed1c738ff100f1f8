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
        """True if the attempt ended before the run."""
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
        late = kind == "seen" and event.get("job_id") != job_id
        if (time_us := microseconds(event.get("time"))) is not None and not late:
            _add_event(attempts, event, kind, time_us / 1e6)
    for number in sorted(set(steps) - {attempt.number for attempt in attempts}):
        starts = [span.start_us for span in breakdown.spans if span.attempt == number]
        attempts.append(Attempt(number, min(starts, default=0) / 1e6))
    for attempt in attempts:
        attempt.first_step, attempt.last_step = steps.get(attempt.number, (None, None))
    _add_costs(attempts, breakdown)
    return attempts


def _add_event(attempts: list[Attempt], event: Mapping[str, Any], kind: str, time: float) -> None:
    last = attempts[-1] if attempts else None
    if kind == "started":
        if last is not None and last.end is None:
            last.end, last.cause = "vanished", VANISHED_CAUSE
        if last is not None and last.followed_by is None:
            last.followed_by = "requeue"
        number, hosts = _whole(event.get("attempt")), event.get("hosts")
        attempts.append(
            Attempt(
                len(attempts) if number is None else number,
                time,
                hosts=[str(host) for host in hosts] if isinstance(hosts, list) else [],
                nodes=_whole(event.get("nodes")),
                world_size=_whole(event.get("world_size")),
            )
        )
    elif last is None:
        return
    elif kind == "staged":
        last.staged = describe_staging(event)
    elif kind == "startup":
        last.startup = StartupDurations.from_event(event)
    elif kind == "resumed":
        last.resumed_step = _whole(event.get("step"))
    elif kind == "failure" and event.get("rank") is not None:
        cause = str(event.get("cause") or "cause not recorded")
        last.ended, last.end, last.cause = time, "failure", f"{cause}{_parenthesize(last.stopped_for)}"
        last.rank, last.host = _whole(event.get("rank")), _text(event.get("host"))
        last.log = _text(event.get("log"))
    elif kind == "grow":
        last.stopped_for = f"requeued to continue on {event.get('nodes')} nodes"
    elif kind == "chaos":
        last.stopped_for = f"fault injected by hpctrain chaos: {event.get('fault')}"
    elif kind == "signal":
        reason = _parenthesize(last.stopped_for)
        saved = "" if event.get("saved") is True else "; no new checkpoint was saved"
        signal, step = event.get("signal"), event.get("step")
        last.ended, last.end = time, "stop"
        last.cause = f"stopped{f' by {signal}' if signal else ''} after step {step}{reason}{saved}"
    elif kind in ("restart", "shrink", "replace", "requeue"):
        last.followed_by = _text(event.get("by")) or kind
        kind_of_end = _text(event.get("class"))
        if last.end is None:
            last.ended, last.end, last.cause = time, "stop", _text(event.get("cause")) or kind_of_end
        elif last.end == "stop" and kind_of_end == "preempted" and last.cause:
            last.cause = last.cause.replace("stopped", kind_of_end, 1)
    elif kind == "seen" and last.followed_by is None:
        state = str(event.get("job_state") or "").partition(" ")[0].rstrip("+")
        if state == "CANCELLED":
            mark_cancelled(last)
        elif last.end is None:
            last.end, last.cause = "vanished", f"{VANISHED_CAUSE} (Slurm state: {state})"
    elif kind == "submitted" and last.end is not None:
        last.followed_by = last.followed_by or ("submission" if is_new_submission(event) else "successor")
    elif kind == "finished":
        state = str(event.get("state")).lower()
        if last.end is None or state != "failed":
            last.ended, last.end, last.cause = time, state, _text(event.get("cause")) or last.cause


def _parenthesize(text: str | None) -> str:
    return f" ({text})" if text else ""


def mark_cancelled(attempt: Attempt) -> None:
    """Record the cancellation of the run in this attempt, unless its supervisor recorded it."""
    if attempt.end not in ("cancelled", "completed"):
        attempt.end, attempt.cause = "cancelled", attempt.cause or CANCELLED


def _add_costs(attempts: Sequence[Attempt], breakdown: TimeBreakdown) -> None:
    after = {TimeCategory.QUEUED, TimeCategory.RESTARTING, TimeCategory.IDLE}
    before = {TimeCategory.STARTING, TimeCategory.LOADING}
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
        elif span.category in after and current.interrupted:
            current.away_us += us
        elif (
            span.category in before and (previous := previous_of.get(current.number)) and previous.interrupted
        ):
            previous.away_us += us


def describe_straggler(event: Mapping[str, Any]) -> str:
    """Describe a straggler, as far as the event has this data."""
    rank, host, ratio = event.get("rank"), event.get("host"), event.get("ratio")
    text = " on ".join(filter(None, [f"rank {rank}" if is_finite(rank) else "", str(host or "")]))
    if not is_finite(ratio):
        return text
    text = f"{text} takes {ratio:.1f} times as long as other ranks".lstrip()
    part = str(event.get("part"))
    if (activity := {"data": "waiting for data", "compute": "computing"}.get(part)) is None:
        return text
    spent = (event.get("seconds"), event.get("typical"))
    times = [by_part.get(part) for by_part in spent if isinstance(by_part, Mapping)]
    durations = [format_duration(seconds) for seconds in times if is_finite(seconds) and seconds >= 0]
    if len(durations) < 2:
        return f"{text} ({activity})"
    return f"{text} ({activity}: {durations[0]} per step, other ranks {durations[1]})"


def _whole(value: object) -> int | None:
    return value if type(value) is int else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)
