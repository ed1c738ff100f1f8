"""Show the current state of a run, from the newest lines of its files, as text for terminals."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.cells import cell_len, set_cell_size

from hpctrain.telemetry.accounting.metric_fields import describe_step
from hpctrain.telemetry.report.attempts import describe_straggler
from hpctrain.telemetry.report.metric_curves import downsample, record_attempt
from hpctrain.text import (
    format_clock,
    format_count,
    format_duration,
    format_memory,
    format_number,
    format_ranks,
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


@dataclass
class GpuSnapshot:
    """Last measurements of the GPUs of a node."""

    host: str
    util: list[float | None]
    memory_bytes: list[float | None]


@dataclass
class TopSnapshot:
    """Current state of a run."""

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
    events: list[dict[str, Any]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    """Last lines of the log of the failed rank, or of the first rank."""

    def document(self) -> dict[str, Any]:
        """Return the document printed by `--json`."""
        return {name: value for name, value in asdict(self).items() if name != "losses"}


class TopView:
    """Bounded summary of a run's records, independent of the length of the run."""

    def __init__(self) -> None:
        self._recent: deque[Mapping[str, Any]] = deque()
        self._losses: OrderedDict[int, float] = OrderedDict()
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._counts = {"failure": 0, "signal": 0}
        self._last_step: int | None = None
        self._attempt: int | None = None
        self._slowest: str | None = None
        self._no_number_since: int | None = None

    def add_records(self, events: Iterable[dict[str, Any]], metrics: Iterable[Mapping[str, Any]]) -> None:
        """Add records written since the last call."""
        for event in events:
            self._add_event(event)
            kind = str(event.get("kind"))
            if kind == "started":
                self._attempt, self._slowest = record_attempt(event), None
            if kind == "straggler":
                self._slowest = describe_straggler(event)
            if kind in self._counts and (kind != "failure" or event.get("rank") is not None):
                self._counts[kind] += 1
        for record in metrics:
            if not is_finite(record.get("step")) or not is_finite(record.get("time")):
                continue
            if self._recent and record_attempt(self._recent[-1]) != record_attempt(record):
                self._recent.clear()
            self._recent.append(record)
            while record["time"] - self._recent[0]["time"] > _SPEED_S:
                self._recent.popleft()
            if is_finite(last := record.get("last_step")):
                self._last_step = int(last)
            if is_finite(loss := record.get("loss")):
                while self._losses and next(reversed(self._losses)) >= record["step"]:
                    self._losses.popitem()  # of a lost step, which is trained again
                self._losses[int(record["step"])] = float(loss)
                if len(self._losses) > _LOSSES:
                    self._losses.popitem(last=False)
                self._no_number_since = None
            elif type(loss) is float and self._no_number_since is None:
                self._no_number_since = int(record["step"])

    def _add_event(self, event: dict[str, Any]) -> None:
        """Store an event; for consecutive checkpoints, only the newest and the number."""
        last = self._events[-1] if self._events else {}
        if event.get("kind") == "checkpoint" == last.get("kind"):
            more = event.get("step") is None or event.get("step") != last.get("step")
            self._events[-1] = {**event, "count": last.get("count", 1) + more}
        else:
            self._events.append(event)

    def snapshot(
        self,
        run_id: str,
        state: str,
        words: str,
        lines: Iterable[Mapping[str, Any]],
        *,
        reports_steps: bool | None = None,
        log: Iterable[str] = (),
    ) -> TopSnapshot:
        """Return the current state of the run. `lines` are the last telemetry lines of the nodes."""
        last = self._recent[-1] if self._recent else {}
        step = int(last["step"]) if last else None
        speed = left = None
        if last and state == "RUNNING":
            seconds, steps = last["time"] - self._recent[0]["time"], last["step"] - self._recent[0]["step"]
            speed = float(steps / seconds) if seconds > 0 and steps > 0 else None
        if speed and step is not None and self._last_step is not None:
            left = max(0, self._last_step - step) / speed
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
            left_s=left,
            waiting_for_data=self._waiting_for_data(),
            slowest=self._slowest,
            losses=list(self._losses.values()),
            gpus=[_gpus(line) for line in lines if isinstance(line.get("gpu_util"), list)],
            events=list(self._events)[::-1],
            log=list(log),
        )

    def _waiting_for_data(self) -> float | None:
        spent = [each for record in self._recent if isinstance(each := record.get("spent"), Mapping)]
        total = sum(each["all"] for each in spent if is_finite(each.get("all")))
        return sum(each["data"] for each in spent if is_finite(each.get("data"))) / total if total else None


def format_view(snapshot: TopSnapshot, width: int, height: int) -> list[tuple[str, str]]:
    """Return lines of at most `width` columns, each with a kind that selects its color.

    The lines that remain of `height` show events and the log.
    """
    width = max(_NARROWEST, width)
    lines = [("title", _title(snapshot))]
    if snapshot.words:
        lines.append(("soft", snapshot.words))
    lines += [("", line) for line in _progress(snapshot, width)]
    lines += [("", line) for line in _gpu_lines(snapshot.gpus, width, most=max(4, height // 2))]
    log = snapshot.log[-max(0, (height - len(lines)) // 3) :]
    room = max(3, height - len(lines) - len(log) - 3)
    events = [
        ("bad" if event.get("kind") == "failure" else "", _event(event)) for event in snapshot.events[:room]
    ]
    lines += [("soft", "events"), *events] if events else [("soft", "no events yet")]
    lines += [("soft", "log"), *(("", line) for line in log)] if log else []
    return [(kind, cut_line(line, width)) for kind, line in lines]


def _title(snapshot: TopSnapshot) -> str:
    attempt = f", attempt {snapshot.attempt}" if snapshot.attempt is not None else ""
    counts = ((snapshot.failures, "failure"), (snapshot.stops, "stop"))
    disturbances = "".join(f", {pluralize(count, noun)}" for count, noun in counts if count)
    return f"{snapshot.run_id}  {snapshot.state}{attempt}{disturbances}"


def _progress(snapshot: TopSnapshot, width: int) -> Iterator[str]:
    step, last = snapshot.step, snapshot.last_step
    if step is None:
        yield f"step   {describe_step(None, snapshot.attempt is None or snapshot.reports_steps)}"
        return
    words = format_count(step) if last is None else f"{format_count(step)} of {format_count(last)}"
    left = "" if snapshot.left_s is None else f"  {format_duration(snapshot.left_s)} left"
    room = width - len(f"step   {words}  {left}")
    yield f"step   {words}" + (f"  {_bar(step / last, min(room, 40))}" if last and room >= 8 else "") + left
    value = format_number(snapshot.loss)
    if snapshot.no_number_since is not None:
        value = (
            f"NaN or infinite since step {format_count(snapshot.no_number_since)}; last finite loss {value}"
        )
    yield f"loss   {value}  {sparkline(snapshot.losses, min(60, width - len(value) - 9))}"
    if snapshot.steps_per_s is not None:
        yield f"speed  {format_number(snapshot.steps_per_s)} steps/s"
    if snapshot.waiting_for_data is not None:
        yield f"data wait  {format_share(snapshot.waiting_for_data)}"
    if snapshot.slowest is not None:
        yield f"slow   {snapshot.slowest}"


def _gpu_lines(nodes: Sequence[GpuSnapshot], width: int, most: int) -> Iterator[str]:
    """Yield one line per node: a block for each GPU, and the mean."""
    hosts = [node.host for node in nodes]
    short = [host.partition(".")[0] for host in hosts]
    names = short if len(set(short)) == len(set(hosts)) else hosts
    widest = min(16, max(map(cell_len, names), default=0))
    for node, name in zip(nodes[:most], names, strict=False):
        known = [value for value in node.util if value is not None]
        blocks = "".join(" " if value is None else _block(value / 100) for value in node.util)
        mean = f"{sum(known) / len(known):3.0f}%" if known else "  –%"
        memory = [value for value in node.memory_bytes if value is not None]
        used = f"  {format_memory(sum(memory))}" if memory else ""
        line = f"gpus   {set_cell_size(name, widest)}  {blocks}  {mean}{used}"
        yield line if cell_len(line) <= width else f"{set_cell_size(name, width - 7)} {mean}"
    if len(nodes) > most:
        yield f"gpus   {pluralize(len(nodes) - most, 'more node')}"


def _gpus(line: Mapping[str, Any]) -> GpuSnapshot:
    util, memory = (
        [float(value) if is_finite(value) else None for value in values] if isinstance(values, list) else []
        for values in (line.get("gpu_util"), line.get("gpu_memory"))
    )
    return GpuSnapshot(str(line.get("host") or "?"), util, memory)


def _event(event: Mapping[str, Any]) -> str:
    time = event.get("time")
    when = format_clock(float(time)) if is_finite(time) and 0 <= time < 1e11 else "?"
    return f"{when}  {event.get('kind')}  {', '.join(_details(event))}".rstrip()


def _details(event: Mapping[str, Any]) -> Iterator[str]:
    """Yield the details of an event, the most important first."""
    kind = event.get("kind")
    if kind == "straggler":
        yield describe_straggler(event)
        return
    if kind == "seen":
        yield f"Slurm: job {event.get('job_id')} {event.get('job_state')}"
        return
    if kind == "chaos":
        ranks, host = event.get("ranks"), event.get("host")
        yield str(event.get("fault"))
        if isinstance(ranks, list) and (ranks := [rank for rank in ranks if isinstance(rank, int)]):
            yield f"{format_ranks(ranks)} on {host}" if host else format_ranks(ranks)
        return
    if is_finite(event.get("step")):
        yield f"step {event['step']}"
    if is_finite(number := event.get("count")) and number > 1:
        yield f"latest of {number}"
    if kind == "signal":
        yield "saved" if event.get("saved") is True else "no new checkpoint saved"
    if kind == "requeue":
        yield str(event.get("class") or "interrupted")
        if is_finite(seconds := event.get("seconds")):
            yield f"after {format_duration(max(0.0, seconds))}"
    if is_finite(nodes := event.get("nodes")):
        before = event.get("nodes_before")
        yield f"from {before} to {nodes} nodes" if is_finite(before) else pluralize(int(nodes), "node")
    if isinstance(hosts := event.get("hosts"), list) and event.get("kind") == "excluded":
        yield ", ".join(map(str, hosts))
    for name in ("fault", "signal", "state", "cause", "reason", "by", "job_id"):
        if event.get(name) and event[name] != kind:
            yield f"job {event[name]}" if name == "job_id" else str(event[name])


def _bar(part: float, width: int) -> str:
    full = round(max(0.0, min(1.0, part)) * width)
    return "█" * full + "░" * (width - full)


def sparkline(values: Sequence[float], width: int, scale: tuple[float, float] | None = None) -> str:
    """Return a sparkline of the values, scaled to `scale`, or else to their range."""
    kept = downsample([(float(place), value) for place, value in enumerate(values)], max(width, 8))
    heights = [value for _, value in kept if value is not None][-max(width, 0) :] if width > 0 else []
    if not heights:
        return ""
    low, high = scale or (min(heights), max(heights))
    return "".join(_block((value - low) / (high - low) if high > low else 0.5) for value in heights)


def _block(part: float) -> str:
    return _BLOCKS[max(0, min(7, int(part * 8)))]


def cut_line(line: str, width: int) -> str:
    """Truncate a line to `width` columns."""
    line = printable(line)
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"
