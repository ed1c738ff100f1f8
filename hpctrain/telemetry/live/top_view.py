"""Show the current state of a run, from the newest lines of its files, as text for terminals."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.cells import cell_len, set_cell_size

from hpctrain.record_types import Event, NodeSample, StepRecord
from hpctrain.telemetry.report.attempts import describe_straggler
from hpctrain.telemetry.report.metric_curves import describe_step, downsample
from hpctrain.text import (
    format_clock,
    format_count,
    format_duration,
    format_memory,
    format_number,
    format_share,
    is_finite,
    pluralize,
    printable,
)

#: Seconds over which the speed is averaged, and the number of losses kept for the curve.
_SPEED_S, _LOSSES = 60.0, 20_000
_EVENTS = 50
_BLOCKS = "▁▂▃▄▅▆▇█"
_NARROWEST = 20
#: Fields of an event that are shown as they are.
_SHOWN_FIELDS = ("fault", "signal", "state", "job_state", "end_kind", "cause", "reason", "by")


@dataclass
class GpuSnapshot:
    host: str
    util: list[float | None]
    memory_bytes: list[float | None]


@dataclass
class TopSnapshot:
    run_id: str
    state: str
    words: str
    attempt: int | None
    failures: int
    stops: int
    step: int | None
    reports_steps: bool | None
    """True if the script reports its steps; None if unknown."""
    last_step: int | None
    loss: float | None
    steps_per_s: float | None
    left_s: float | None
    """Seconds until the last step, at the speed of the last minute."""
    waiting_for_data: float | None
    """Fraction of the last minute spent waiting for data."""
    no_number_since: int | None = None
    """First step of the current NaN or infinite losses; `loss` is then the last finite loss."""
    slowest: str | None = None
    """The rank or node that the supervisor detected as a straggler in this attempt."""
    losses: list[float] = field(default_factory=list)
    gpus: list[GpuSnapshot] = field(default_factory=list)
    events: list[tuple[Event, int]] = field(default_factory=list)
    """Newest first. Consecutive checkpoints are represented by the last, with their number."""
    log: list[str] = field(default_factory=list)
    """Last lines of the log of the failed rank, or of the first rank."""

    def document(self) -> dict[str, Any]:
        """Return the document printed by `--json`."""
        events = [event.fields() | ({"count": count} if count > 1 else {}) for event, count in self.events]
        return {name: value for name, value in asdict(self).items() if name != "losses"} | {"events": events}


class TopView:
    """Bounded summary of a run's records, independent of the length of the run."""

    def __init__(self) -> None:
        self._recent: deque[StepRecord] = deque()
        self._losses: OrderedDict[int, float] = OrderedDict()
        self._events: deque[tuple[Event, int]] = deque(maxlen=_EVENTS)
        self._counts = {"failure": 0, "signal": 0}
        self._last_step: int | None = None
        self._attempt: int | None = None
        self._slowest: str | None = None
        self._no_number_since: int | None = None

    def add_records(self, events: Iterable[Event], metrics: Iterable[StepRecord]) -> None:
        """Add records written since the last call."""
        for event in events:
            self._add_event(event)
        for record in metrics:
            self._add_metrics(record)

    def _add_event(self, event: Event) -> None:
        """Store an event; for consecutive checkpoints, only the newest and the number."""
        kind = event.kind
        if self._events and kind == "checkpoint" == self._events[-1][0].kind:
            previous, count = self._events[-1]
            self._events[-1] = event, count + (event.step is None or event.step != previous.step)
        else:
            self._events.append((event, 1))
        if kind == "started":
            self._attempt, self._slowest = event.attempt, None
        if kind == "straggler":
            self._slowest = describe_straggler(event)
        if kind in self._counts and (kind != "failure" or event.rank is not None):
            self._counts[kind] += 1

    def _add_metrics(self, record: StepRecord) -> None:
        if self._recent and self._recent[-1].attempt != record.attempt:
            self._recent.clear()
        self._recent.append(record)
        while record.time - self._recent[0].time > _SPEED_S:
            self._recent.popleft()
        self._last_step = self._last_step if record.last_step is None else record.last_step
        if is_finite(loss := record.metrics.get("loss")):
            while self._losses and next(reversed(self._losses)) >= record.step:
                self._losses.popitem()  # of a lost step, which is trained again
            self._losses[record.step] = float(loss)
            if len(self._losses) > _LOSSES:
                self._losses.popitem(last=False)
            self._no_number_since = None
        elif type(loss) is float and self._no_number_since is None:
            self._no_number_since = record.step

    def snapshot(
        self,
        run_id: str,
        state: str,
        words: str,
        samples: Iterable[NodeSample],
        *,
        reports_steps: bool | None = None,
        log: Iterable[str] = (),
    ) -> TopSnapshot:
        """Return the current state of the run. `samples` are the last measurements of the nodes."""
        step = speed = left_s = None
        if self._recent:
            oldest, newest = self._recent[0], self._recent[-1]
            step = newest.step
            seconds, steps = newest.time - oldest.time, newest.step - oldest.step
            if state == "RUNNING" and seconds > 0 and steps > 0:
                speed = steps / seconds
        if speed and step is not None and self._last_step is not None:
            left_s = max(0, self._last_step - step) / speed
        total_s, data_s = (
            sum(record.spent.get(name, 0.0) for record in self._recent) for name in ("all", "data")
        )
        return TopSnapshot(
            run_id=run_id,
            state=state,
            words=words,
            attempt=self._attempt,
            failures=self._counts["failure"],
            stops=self._counts["signal"],
            step=step,
            reports_steps=reports_steps if step is None else True,
            last_step=self._last_step,
            loss=next(iter(reversed(self._losses.values())), None),
            no_number_since=self._no_number_since,
            steps_per_s=speed,
            left_s=left_s,
            waiting_for_data=data_s / total_s if total_s else None,
            slowest=self._slowest,
            losses=list(self._losses.values()),
            gpus=[
                GpuSnapshot(sample.host or "?", sample.gpu_util, sample.gpu_memory or [])
                for sample in samples
                if sample.gpu_util is not None
            ],
            events=list(self._events)[::-1],
            log=list(log),
        )


def format_view(snapshot: TopSnapshot, width: int, height: int) -> list[tuple[str, str]]:
    """Return lines for a terminal of this size, each with a kind that selects its color."""
    width = max(_NARROWEST, width)
    attempt = f", attempt {snapshot.attempt}" if snapshot.attempt is not None else ""
    counts = ((snapshot.failures, "failure"), (snapshot.stops, "stop"))
    disturbances = "".join(f", {pluralize(count, noun)}" for count, noun in counts if count)
    lines = [("title", f"{snapshot.run_id}  {snapshot.state}{attempt}{disturbances}")]
    if snapshot.words:
        lines.append(("soft", snapshot.words))
    lines += [("", line) for line in _progress(snapshot, width)]
    lines += [("", line) for line in _gpu_lines(snapshot.gpus, width, max(4, height // 2))]
    log = snapshot.log[-max(0, (height - len(lines)) // 3) :]
    room = max(3, height - len(lines) - len(log) - 3)
    events = [
        ("bad" if event.kind == "failure" else "", _describe_event(event, count))
        for event, count in snapshot.events[:room]
    ]
    lines += [("soft", "events"), *events] if events else [("soft", "no events yet")]
    lines += [("soft", "log"), *(("", line) for line in log)] if log else []
    return [(kind, cut_line(line, width)) for kind, line in lines]


def _progress(snapshot: TopSnapshot, width: int) -> Iterator[str]:
    step, last_step = snapshot.step, snapshot.last_step
    if step is None:
        yield f"step   {describe_step(None, snapshot.attempt is None or snapshot.reports_steps)}"
        return
    count = format_count(step) if last_step is None else f"{format_count(step)} of {format_count(last_step)}"
    remaining = "" if snapshot.left_s is None else f"  {format_duration(snapshot.left_s)} left"
    bar, room = "", min(40, width - len(f"step   {count}  {remaining}"))
    if last_step and room >= 8:
        num_full = round(max(0.0, min(1.0, step / last_step)) * room)
        bar = f"  {'█' * num_full}{'░' * (room - num_full)}"
    yield f"step   {count}{bar}{remaining}"
    loss = format_number(snapshot.loss)
    if snapshot.no_number_since is not None:
        loss = f"NaN or infinite since step {format_count(snapshot.no_number_since)}; last finite loss {loss}"
    yield f"loss   {loss}  {sparkline(snapshot.losses, min(60, width - len(loss) - 9))}"
    if snapshot.steps_per_s is not None:
        yield f"speed  {format_number(snapshot.steps_per_s)} steps/s"
    if snapshot.waiting_for_data is not None:
        yield f"data wait  {format_share(snapshot.waiting_for_data)}"
    if snapshot.slowest is not None:
        yield f"slow   {snapshot.slowest}"


def _gpu_lines(nodes: Sequence[GpuSnapshot], width: int, limit: int) -> Iterator[str]:
    """Yield one line per node: a block for each GPU, and the mean."""
    name_width = min(16, max((cell_len(node.host) for node in nodes), default=0))
    for node in nodes[:limit]:
        values = [value for value in node.util if value is not None]
        blocks = "".join(" " if value is None else _block(value / 100) for value in node.util)
        mean = f"{sum(values) / len(values):3.0f}%" if values else "  –%"
        memory = [value for value in node.memory_bytes if value is not None]
        used = f"  {format_memory(sum(memory))}" if memory else ""
        line = f"gpus   {set_cell_size(node.host, name_width)}  {blocks}  {mean}{used}"
        yield line if cell_len(line) <= width else f"{set_cell_size(node.host, width - 7)} {mean}"
    if len(nodes) > limit:
        yield f"gpus   {pluralize(len(nodes) - limit, 'more node')}"


def _describe_event(event: Event, count: int) -> str:
    clock, kind = format_clock(event.time), event.kind
    if kind == "straggler":
        return f"{clock}  straggler  {describe_straggler(event)}"
    details = [f"job {event.job_id}"] if event.job_id else []
    if event.step is not None:
        details.append(f"step {event.step}")
    if count > 1:
        details.append(f"latest of {count}")
    if event.nodes is not None:
        details.append(pluralize(event.nodes, "node"))
    if kind == "signal":
        details.append("saved" if event.saved else "no new checkpoint saved")
    if event.ranks:
        details.append(f"ranks {', '.join(map(str, event.ranks))} on {event.host}")
    if kind == "excluded":
        details += event.hosts or []
    details += [value for name in _SHOWN_FIELDS if (value := getattr(event, name)) not in (None, "", kind)]
    return f"{clock}  {kind}  {', '.join(details)}".rstrip()


def sparkline(values: Sequence[float], width: int, scale: tuple[float, float] | None = None) -> str:
    """Return a sparkline of the values, scaled to `scale`, or else to their range."""
    points = downsample([(float(index), value) for index, value in enumerate(values)], max(width, 8))
    heights = [value for _, value in points if value is not None][-max(width, 0) :] if width > 0 else []
    if not heights:
        return ""
    low, high = scale or (min(heights), max(heights))
    return "".join(_block((value - low) / (high - low) if high > low else 0.5) for value in heights)


def _block(share: float) -> str:
    return _BLOCKS[max(0, min(7, int(share * 8)))]


def cut_line(line: str, width: int) -> str:
    line = printable(line)
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"
