"""Timeline of a run as rectangles: time by category, attempts, nodes and failures."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from hpctrain.telemetry.accounting.time_spans import TimeCategory, TimeSpan
from hpctrain.telemetry.report.run_data import RunData
from hpctrain.telemetry.report.summary import describe_attempt_end
from hpctrain.text import format_clock, format_duration

#: Number of horizontal units of the drawing; narrower objects are not drawn separately.
WIDTH = 1000
#: Number of nodes visible initially, and after expanding.
_HOSTS_IN_SIGHT, _MAX_HOSTS = 12, 128
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


@dataclass(frozen=True)
class TimelineBar:
    """A rectangle."""

    x: float
    width: float
    kind: str
    """A class of the style sheet."""
    title: str
    label: str = ""


@dataclass(frozen=True)
class TimelinePoint:
    """An event at a single time."""

    x: float
    kind: str
    title: str


@dataclass
class TimelineRow:
    """A row of the drawing."""

    name: str
    bars: list[TimelineBar] = field(default_factory=list)
    points: list[TimelinePoint] = field(default_factory=list)


@dataclass
class Timeline:
    """The complete drawing."""

    time: TimelineRow
    attempts: TimelineRow
    hosts: list[TimelineRow]
    """If not all nodes are visible, nodes with failures are first."""
    more_hosts: list[TimelineRow]
    hosts_omitted: int
    ticks: list[tuple[float, str]]


def build_timeline(run_data: RunData) -> Timeline:
    """Return the timeline of a run with at least one record."""
    start, end = run_data.start, max(run_data.end, run_data.start + 1e-6)

    def x(time: float) -> float:
        return round(min(max((time - start) / (end - start), 0.0), 1.0) * WIDTH, 2)

    attempts, hosts = TimelineRow("attempts"), dict[str, TimelineRow]()
    ends = [*(attempt.started for attempt in run_data.attempts[1:]), end]
    for attempt, until in zip(run_data.attempts, ends, strict=False):  # Without attempts, `end` remains.
        ended = attempt.ended if attempt.ended is not None else until
        words = f"attempt {attempt.number}, {format_clock(attempt.started)}: {describe_attempt_end(attempt)}"
        left = x(attempt.started)
        kind = "failed" if attempt.end in ("failure", "vanished", "failed") else "attempt"
        bar = TimelineBar(left, max(1.0, x(ended) - left), kind, words, str(attempt.number))
        attempts.bars.append(bar)
        for host in attempt.hosts:
            lane = hosts.setdefault(host, TimelineRow(host))
            lane.bars.append(TimelineBar(bar.x, bar.width, "host", f"{host}: {words}"))
            if host == attempt.host:
                lane.points.append(TimelinePoint(x(ended), "fault", f"{host}: {attempt.cause}"))
        if attempt.interrupted:
            attempts.points.append(
                TimelinePoint(x(ended), "stop" if attempt.end == "stop" else "fault", words)
            )
    # Nodes with failures take precedence.
    shown = list(hosts.values())
    if len(shown) > _HOSTS_IN_SIGHT:
        shown = sorted(shown, key=lambda lane: not lane.points)[:_MAX_HOSTS]
    saves = TimelineRow("time")
    saves.bars = _bars(run_data.breakdown.spans)
    saves.points = [
        TimelinePoint(x(one.time), "save", f"checkpoint of step {one.step}, {format_clock(one.time)}")
        for one in run_data.checkpoints
    ]
    saves.points = _apart(saves.points)
    return Timeline(
        time=saves,
        attempts=attempts,
        hosts=shown[:_HOSTS_IN_SIGHT],
        more_hosts=shown[_HOSTS_IN_SIGHT:],
        hosts_omitted=len(hosts) - len(shown),
        ticks=_ticks(end - start),
    )


def _bars(spans: tuple[TimeSpan, ...]) -> list[TimelineBar]:
    """Return the dominant category of each unit; merged into bars of equal category."""
    first, last = spans[0].start_us, spans[-1].end_us
    starts = [span.start_us for span in spans]
    bars: list[TimelineBar] = []
    for column in range(WIDTH):
        begin = first + (last - first) * column // WIDTH
        end = first + (last - first) * (column + 1) // WIDTH
        totals: dict[TimeCategory, int] = {}
        place = bisect_right(starts, begin) - 1
        while place < len(spans) and spans[place].start_us < end:
            us = min(end, spans[place].end_us) - max(begin, spans[place].start_us)
            totals[spans[place].category] = totals.get(spans[place].category, 0) + us
            place += 1
        what = max(totals, key=lambda what: totals[what], default=TimeCategory.IDLE)
        if bars and bars[-1].kind == what.name.lower():
            bars[-1] = TimelineBar(bars[-1].x, bars[-1].width + 1, bars[-1].kind, "")
        else:
            bars.append(TimelineBar(column, 1, what.name.lower(), ""))
    unit_s = (last - first) / WIDTH / 1e6
    return [
        TimelineBar(
            bar.x,
            bar.width,
            bar.kind,
            f"{TimeCategory[bar.kind.upper()].value}, about {format_duration(bar.width * unit_s)}",
        )
        for bar in bars
    ]


def _apart(points: list[TimelinePoint]) -> list[TimelinePoint]:
    """Return points that are at least two units apart."""
    kept: list[TimelinePoint] = []
    for point in points:
        if not kept or point.x - kept[-1].x >= 2:
            kept.append(point)
    return kept


def _round(seconds: int) -> str:
    return f"{seconds} s" if seconds < 60 else format_duration(seconds)


def _ticks(seconds: float) -> list[tuple[float, str]]:
    """Return round times since the start as ticks, five to ten of them."""
    step = next((each for each in _STEPS_S if seconds / each <= 8), None)
    if step is None:
        step = 86400 * -(-round(seconds) // (86400 * 8))
    return [
        (round(WIDTH * at / seconds, 2), _round(at))
        for at in range(0, int(seconds) + 1, step)
        if at < 0.97 * seconds
    ]
