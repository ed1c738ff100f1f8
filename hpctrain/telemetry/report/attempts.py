"""Read the attempts of a run: progress, end, and cost of the end."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from hpctrain.record_types import Event
from hpctrain.telemetry.accounting.time_breakdown import TimeBreakdown
from hpctrain.telemetry.accounting.timeline_events import TimeCategory
from hpctrain.telemetry.startup_parts import describe_staging
from hpctrain.text import format_duration

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
    """The most ranks that trained together; None if unknown."""
    startup: dict[str, Any] | None = None
    """Fields of the `startup` event."""
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
    events: Iterable[Event], breakdown: TimeBreakdown, steps: Mapping[int, tuple[int, int]]
) -> list[Attempt]:
    """Return all attempts of a run, in order. `steps` are the first and the last logged step of each."""
    attempts: list[Attempt] = []
    programs: dict[int, list[Event]] = {}
    job_id: str | None = None
    for event in events:
        if event.kind == "submitted":
            job_id = event.job_id
        # Slurm's final state of an earlier job may be recorded late.
        if event.kind == "seen" and event.job_id != job_id:
            continue
        if event.kind == "started":
            if attempts:
                last = attempts[-1]
                if last.end is None:
                    last.end, last.cause = "vanished", VANISHED_CAUSE
                last.followed_by = last.followed_by or "requeue"
            started = Attempt(event.attempt, event.time, event.hosts or [], event.nodes, event.world_size)
            attempts.append(started)
        elif event.kind == "ranks":
            programs.setdefault(event.attempt, []).append(event)
        elif attempts:
            _add_event(attempts[-1], event)
    for number in sorted(set(steps) - {attempt.number for attempt in attempts}):
        starts = [span.start_us for span in breakdown.spans if span.attempt == number]
        attempts.append(Attempt(number, min(starts, default=0) / 1e6))
    for attempt in attempts:
        attempt.first_step, attempt.last_step = steps.get(attempt.number, (None, None))
        if trained := programs.get(attempt.number):
            # A program of unknown size, or one that trains beside another, makes the number unknown.
            largest = min(trained, key=lambda event: (event.world_size is not None, -(event.world_size or 0)))
            attempt.world_size, attempt.nodes = largest.world_size, largest.nodes or attempt.nodes
    _add_costs(attempts, breakdown)
    return attempts


def describe_arguments(events: Iterable[Event]) -> list[str]:
    """Return the arguments of the script in each group of attempts; empty if they never changed."""
    groups: list[tuple[str, list[int]]] = []
    arguments = ""
    for event in events:
        if event.is_new_submission:
            arguments = shlex.join(event.args or ())
        elif event.kind == "started":
            if not groups or groups[-1][0] != arguments:
                groups.append((arguments, []))
            groups[-1][1].append(event.attempt)
    lines = [
        f"attempt {numbers[0]}{f' to {numbers[-1]}' if numbers[1:] else ''}: {arguments or 'no arguments'}"
        for arguments, numbers in groups
    ]
    return lines if len(lines) > 1 else []


def _add_event(attempt: Attempt, event: Event) -> None:
    kind = event.kind
    reason = f" ({attempt.stopped_for})" if attempt.stopped_for else ""
    if kind == "staged":
        attempt.staged = describe_staging(event)
    elif kind == "startup":
        attempt.startup = {name: event.fields()[name] for name in ("seconds", "parts", "slowest_nodes")}
    elif kind == "resumed":
        attempt.resumed_step = event.step
    elif kind == "failure" and event.rank is not None:
        attempt.ended, attempt.end = event.time, "failure"
        attempt.cause = f"{event.cause or 'cause not recorded'}{reason}"
        attempt.rank, attempt.host, attempt.log = event.rank, event.host, event.log
    elif kind == "grow":
        attempt.stopped_for = f"requeued to continue on {event.nodes} nodes"
    elif kind == "chaos":
        attempt.stopped_for = f"fault injected by hpctrain chaos: {event.fault}"
    elif kind == "signal":
        saved = "" if event.saved else "; no new checkpoint was saved"
        signal = f" by {event.signal}" if event.signal else ""
        attempt.ended, attempt.end = event.time, "stop"
        attempt.cause = f"stopped{signal} after step {event.step}{reason}{saved}"
    elif kind in ("restart", "shrink", "replace", "requeue"):
        by_slurm = event.by == "slurm"
        attempt.followed_by = kind if by_slurm else event.by or kind
        if attempt.end is None:
            attempt.ended, attempt.end = event.time, "stop"
            attempt.cause = event.cause or event.end_kind
        elif attempt.end == "stop" and event.end_kind == "preempted" and attempt.cause:
            attempt.cause = attempt.cause.replace("stopped", event.end_kind, 1)
        elif attempt.end == "stop" and by_slurm and event.cause:
            attempt.cause = f"{event.cause}: {attempt.cause}"
    elif kind == "seen" and attempt.followed_by is None:
        state = (event.job_state or "").partition(" ")[0].rstrip("+")
        if state == "CANCELLED":
            mark_cancelled(attempt)
        elif attempt.end is None:
            attempt.end, attempt.cause = "vanished", f"{VANISHED_CAUSE} (Slurm state: {state})"
    elif kind == "submitted" and attempt.end is not None:
        follow_up = "submission" if event.is_new_submission else "successor"
        attempt.followed_by = attempt.followed_by or follow_up
    elif kind == "finished":
        state = (event.state or "").lower()
        if attempt.end is None or state != "failed":
            attempt.ended, attempt.end = event.time, state
            attempt.cause = event.cause or attempt.cause


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


def describe_straggler(event: Event) -> str:
    """Describe a straggler, as far as the event has this data."""
    rank = "" if event.rank is None else f"rank {event.rank}"
    text = " on ".join(filter(None, [rank, event.host]))
    if event.ratio is None:
        return text
    text = f"{text} takes {event.ratio:.1f} times as long as other ranks".lstrip()
    activity = {"data": "waiting for data", "compute": "computing"}.get(event.part or "")
    if activity is None or event.part is None:
        return text
    times = [times.get(event.part) for times in (event.seconds, event.typical) if isinstance(times, dict)]
    if None in times or len(times) < 2:
        return f"{text} ({activity})"
    own, typical = map(format_duration, times)
    return f"{text} ({activity}: {own} per step, other ranks {typical})"
