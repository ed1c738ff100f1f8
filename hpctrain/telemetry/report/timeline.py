"""A run over time as rectangles: where the time went, its attempts, its nodes, and what went wrong."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from hpctrain.telemetry.report.facts import Facts
from hpctrain.telemetry.report.story import how_it_ended
from hpctrain.telemetry.report.words import clock, duration
from hpctrain.telemetry.spans import Span, What

#: Units of the drawing from left to right; what is narrower than one is not drawn by itself.
WIDTH = 1000
#: Nodes that are seen at once, and those that are seen where somebody asks.
_HOSTS_IN_SIGHT, _MOST_HOSTS = 12, 128
_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


@dataclass(frozen=True)
class Bar:
    """A rectangle."""

    x: float
    width: float
    kind: str
    """A class of the style sheet."""
    title: str
    label: str = ""


@dataclass(frozen=True)
class Point:
    """Something that happened at a moment."""

    x: float
    kind: str
    title: str


@dataclass
class Lane:
    """A row of the drawing."""

    name: str
    bars: list[Bar] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)


@dataclass
class Timeline:
    """The whole drawing."""

    time: Lane
    attempts: Lane
    hosts: list[Lane]
    """Those on which something went wrong come first, where not all can be in sight."""
    more_hosts: list[Lane]
    hosts_left_out: int
    ticks: list[tuple[float, str]]


def draw(facts: Facts) -> Timeline:
    """The drawing of a run that has begun."""
    start, end = facts.start, max(facts.end, facts.start + 1e-6)

    def x(time: float) -> float:
        return round(min(max((time - start) / (end - start), 0.0), 1.0) * WIDTH, 2)

    attempts, hosts = Lane("starts"), dict[str, Lane]()
    ends = [attempt.started for attempt in facts.attempts[1:]] + [end]
    for attempt, until in zip(facts.attempts, ends, strict=True):
        ended = attempt.ended if attempt.ended is not None else until
        words = f"start {attempt.number}, {clock(attempt.started)}: {how_it_ended(attempt)}"
        left = x(attempt.started)
        kind = "failed" if attempt.end in ("failure", "vanished", "failed") else "attempt"
        bar = Bar(left, max(1.0, x(ended) - left), kind, words, str(attempt.number))
        attempts.bars.append(bar)
        for host in attempt.hosts:
            lane = hosts.setdefault(host, Lane(host))
            lane.bars.append(Bar(bar.x, bar.width, "host", f"{host}: {words}"))
            if host == attempt.host:
                lane.points.append(Point(x(ended), "fault", f"{host}: {attempt.cause}"))
        if attempt.interrupted:
            attempts.points.append(Point(x(ended), "stop" if attempt.end == "stop" else "fault", words))
    # Nodes on which something went wrong are not left out.
    shown = list(hosts.values())
    if len(shown) > _HOSTS_IN_SIGHT:
        shown = sorted(shown, key=lambda lane: not lane.points)[:_MOST_HOSTS]
    saves = Lane("time")
    saves.bars = _bars(facts.ledger.spans)
    saves.points = [
        Point(x(one.time), "save", f"checkpoint of step {one.step}, {clock(one.time)}")
        for one in facts.checkpoints
    ]
    saves.points = _apart(saves.points)
    return Timeline(
        time=saves,
        attempts=attempts,
        hosts=shown[:_HOSTS_IN_SIGHT],
        more_hosts=shown[_HOSTS_IN_SIGHT:],
        hosts_left_out=len(hosts) - len(shown),
        ticks=_ticks(end - start),
    )


def _bars(spans: tuple[Span, ...]) -> list[Bar]:
    """What most of each unit's time was spent on; work that counts is told apart in the table only."""
    first, last = spans[0].start_us, spans[-1].end_us
    starts = [span.start_us for span in spans]
    bars: list[Bar] = []
    for column in range(WIDTH):
        begin = first + (last - first) * column // WIDTH
        end = first + (last - first) * (column + 1) // WIDTH
        totals: dict[What, int] = {}
        place = bisect_right(starts, begin) - 1
        while place < len(spans) and spans[place].start_us < end:
            us = min(end, spans[place].end_us) - max(begin, spans[place].start_us)
            totals[spans[place].what] = totals.get(spans[place].what, 0) + us
            place += 1
        what = max(totals, key=lambda what: totals[what], default=What.IDLE)
        if bars and bars[-1].kind == what.name.lower():
            bars[-1] = Bar(bars[-1].x, bars[-1].width + 1, bars[-1].kind, "")
        else:
            bars.append(Bar(column, 1, what.name.lower(), ""))
    unit_s = (last - first) / WIDTH / 1e6
    return [
        Bar(
            bar.x,
            bar.width,
            bar.kind,
            f"{What[bar.kind.upper()].value}, about {duration(bar.width * unit_s)}",
        )
        for bar in bars
    ]


def _apart(points: list[Point]) -> list[Point]:
    """Those that are at least two units apart."""
    kept: list[Point] = []
    for point in points:
        if not kept or point.x - kept[-1].x >= 2:
            kept.append(point)
    return kept


def _round(seconds: int) -> str:
    return f"{seconds} s" if seconds < 60 else duration(seconds)


def _ticks(seconds: float) -> list[tuple[float, str]]:
    """Five to ten round times since the start."""
    step = next((each for each in _STEPS_S if seconds / each <= 8), None)
    if step is None:
        step = 86400 * -(-round(seconds) // (86400 * 8))
    return [
        (round(WIDTH * at / seconds, 2), _round(at))
        for at in range(0, int(seconds) + 1, step)
        if at < 0.97 * seconds
    ]
