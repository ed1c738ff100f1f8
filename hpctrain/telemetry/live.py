"""How a run does right now: what its files said last, as lines of text for any terminal."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.cells import cell_len, set_cell_size

from hpctrain.telemetry.marks import is_finite
from hpctrain.telemetry.report.curves import attempt_of, thin
from hpctrain.telemetry.report.words import clock, count, duration, number, plain, whole
from hpctrain.telemetry.stragglers import how_slow, who

#: Seconds of training that the speed is the mean of, and losses that are kept for their curve.
_SPEED_S, _LOSSES = 60.0, 20_000
_EVENTS = 50
_BLOCKS = "▁▂▃▄▅▆▇█"
_NARROWEST = 20


@dataclass
class Gpus:
    """What a node measured of its GPUs last."""

    host: str
    util: list[float | None]
    memory_bytes: list[float | None]


@dataclass
class Snapshot:
    """Where a run stands."""

    run_id: str
    state: str
    words: str
    attempt: int | None
    failures: int
    stops: int
    step: int | None
    last_step: int | None
    loss: float | None
    steps_per_s: float | None
    left_s: float | None
    """Until the last step, at the speed of the last minute."""
    waiting_for_data: float | None
    """The share of the last minute's time in which there was no batch."""
    no_number_since: int | None = None
    """The step from which on the loss is infinite or not a number; `loss` is then the last that was one."""
    slowest: str | None = None
    """Which rank or node holds up the others, where the supervisor has noticed one in this start."""
    losses: list[float] = field(default_factory=list)
    gpus: list[Gpus] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {name: value for name, value in asdict(self).items() if name != "losses"}


class Live:
    """Keeps what is needed of what a run writes, however long it gets."""

    def __init__(self) -> None:
        self._recent: deque[Mapping[str, Any]] = deque()
        self._losses: dict[int, float] = {}
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)
        self._counts = {"failure": 0, "signal": 0}
        self._last_step: int | None = None
        self._attempt: int | None = None
        self._slowest: str | None = None
        self._no_number_since: int | None = None

    def take(self, events: Iterable[dict[str, Any]], metrics: Iterable[Mapping[str, Any]]) -> None:
        """Take in what was written since the last call."""
        for event in events:
            self._events.append(event)
            kind = str(event.get("kind"))
            if kind == "started":
                self._attempt, self._slowest = attempt_of(event), None
            if kind == "straggler":
                self._slowest = ": ".join(filter(None, [who(event), how_slow(event)]))
            if kind in self._counts and (kind != "failure" or event.get("rank") is not None):
                self._counts[kind] += 1
        for record in metrics:
            if not is_finite(record.get("step")) or not is_finite(record.get("time")):
                continue
            if self._recent and attempt_of(self._recent[-1]) != attempt_of(record):
                self._recent.clear()
            self._recent.append(record)
            while record["time"] - self._recent[0]["time"] > _SPEED_S:
                self._recent.popleft()
            if is_finite(last := record.get("last_step")):
                self._last_step = int(last)
            if is_finite(loss := record.get("loss")):
                self._losses[int(record["step"])] = float(loss)
                self._no_number_since = None
            elif type(loss) is float and self._no_number_since is None:
                self._no_number_since = int(record["step"])
        while len(self._losses) > _LOSSES:
            self._losses.pop(next(iter(self._losses)))

    def snapshot(self, run_id: str, state: str, words: str, lines: Iterable[Mapping[str, Any]]) -> Snapshot:
        """Where the run stands.

        Args:
            run_id: its name.
            state: what the caller knows of it.
            words: what the scheduler says besides.
            lines: the last line of each node's telemetry.
        """
        last = self._recent[-1] if self._recent else {}
        step = int(last["step"]) if last else None
        speed = self._speed() if state == "RUNNING" else None
        left = None
        if speed and step is not None and self._last_step is not None:
            left = max(0, self._last_step - step) / speed
        return Snapshot(
            run_id=run_id,
            state=state,
            words=words,
            attempt=self._attempt,
            failures=self._counts["failure"],
            stops=self._counts["signal"],
            step=step,
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
        )

    def _speed(self) -> float | None:
        if len(self._recent) < 2:
            return None
        first, last = self._recent[0], self._recent[-1]
        seconds, steps = last["time"] - first["time"], last["step"] - first["step"]
        return float(steps / seconds) if seconds > 0 and steps > 0 else None

    def _waiting_for_data(self) -> float | None:
        spent = [each for record in self._recent if isinstance(each := record.get("spent"), Mapping)]
        total = sum(each["all"] for each in spent if is_finite(each.get("all")))
        return sum(each["data"] for each in spent if is_finite(each.get("data"))) / total if total else None


def as_lines(snapshot: Snapshot, width: int, height: int) -> list[tuple[str, str]]:
    """The view: lines that are no longer than `width`, each with what it is, for whoever gives it a colour.

    Args:
        snapshot: where the run stands.
        width: columns of the terminal.
        height: its lines; the rest of them is for events.
    """
    width = max(_NARROWEST, width)
    lines = [("title", _title(snapshot))]
    if snapshot.words:
        lines.append(("soft", snapshot.words))
    lines += [("", line) for line in _progress(snapshot, width)]
    lines += [("", line) for line in _gpu_lines(snapshot.gpus, width, most=max(4, height // 2))]
    room = max(3, height - len(lines) - 2)
    told = [(_kind(event), _event(event)) for event in snapshot.events[:room]]
    lines += [("soft", "events"), *told] if told else [("soft", "nothing has happened yet")]
    return [(kind, _cut(line, width)) for kind, line in lines]


def _title(snapshot: Snapshot) -> str:
    parts = [f"{snapshot.run_id}  {snapshot.state}"]
    if snapshot.attempt is not None:
        parts.append(f"start {snapshot.attempt}")
    if snapshot.failures:
        parts.append(count(snapshot.failures, "failure"))
    if snapshot.stops:
        parts.append(count(snapshot.stops, "stop"))
    return ", ".join(parts)


def _progress(snapshot: Snapshot, width: int) -> Iterator[str]:
    step, last = snapshot.step, snapshot.last_step
    if step is None:
        yield "step   none yet"
        return
    words = whole(step) if last is None else f"{whole(step)} of {whole(last)}"
    left = "" if snapshot.left_s is None else f"  {duration(snapshot.left_s)} left"
    room = width - len(f"step   {words}  {left}")
    yield f"step   {words}" + (f"  {_bar(step / last, min(room, 40))}" if last and room >= 8 else "") + left
    value = number(snapshot.loss)
    if snapshot.no_number_since is not None:
        value = f"no number since step {whole(snapshot.no_number_since)}; before that {value}"
    yield f"loss   {value}  {_spark(snapshot.losses, min(60, width - len(value) - 9))}"
    if snapshot.steps_per_s is not None:
        yield f"speed  {number(snapshot.steps_per_s)} steps a second"
    if snapshot.waiting_for_data is not None:
        yield f"data   waited for in {100 * snapshot.waiting_for_data:.1f} % of the time"
    if snapshot.slowest is not None:
        yield f"slow   {snapshot.slowest}"


def _gpu_lines(nodes: Sequence[Gpus], width: int, most: int) -> Iterator[str]:
    """A line a node, with a block for each GPU, and the mean in figures."""
    names = _short([node.host for node in nodes])
    widest = min(16, max(map(cell_len, names), default=0))
    for node, name in zip(nodes[:most], names, strict=False):
        known = [value for value in node.util if value is not None]
        blocks = "".join(" " if value is None else _block(value / 100) for value in node.util)
        mean = f"{sum(known) / len(known):3.0f} %" if known else "  – %"
        memory = [value for value in node.memory_bytes if value is not None]
        used = f"  {sum(memory) / 2**30:.0f} GiB" if memory else ""
        line = f"gpus   {set_cell_size(name, widest)}  {blocks}  {mean}{used}"
        yield line if cell_len(line) <= width else f"{set_cell_size(name, width - 7)} {mean}"
    if len(nodes) > most:
        yield f"gpus   {len(nodes) - most} more nodes"


def _short(hosts: Sequence[str]) -> list[str]:
    """Names without their domain, where that leaves them different."""
    short = [host.partition(".")[0] for host in hosts]
    return short if len(set(short)) == len(set(hosts)) else list(hosts)


def _gpus(line: Mapping[str, Any]) -> Gpus:
    def values(name: str) -> list[float | None]:
        listed = line.get(name)
        return (
            [float(value) if is_finite(value) else None for value in listed]
            if isinstance(listed, list)
            else []
        )

    return Gpus(str(line.get("host") or "?"), values("gpu_util"), values("gpu_memory"))


def _event(event: Mapping[str, Any]) -> str:
    time = event.get("time")
    when = clock(float(time)) if is_finite(time) and 0 <= time < 1e11 else "?"
    return f"{when}  {event.get('kind')}  {', '.join(_details(event))}".rstrip()


def _details(event: Mapping[str, Any]) -> Iterator[str]:
    """What an event tells besides its kind, in the order in which it matters."""
    if event.get("kind") == "straggler":
        yield from filter(None, [who(event), how_slow(event)])
        return
    if is_finite(event.get("step")):
        yield f"step {event['step']}"
    if is_finite(nodes := event.get("nodes")):
        before = event.get("nodes_before")
        yield f"{before} nodes to {nodes}" if is_finite(before) else count(int(nodes), "node")
    if isinstance(hosts := event.get("hosts"), list) and event.get("kind") == "excluded":
        yield ", ".join(map(str, hosts))
    for name in ("fault", "signal", "state", "cause", "reason", "by", "job_id"):
        if event.get(name) and event[name] != event.get("kind"):
            yield str(event[name])


def _kind(event: Mapping[str, Any]) -> str:
    return "bad" if event.get("kind") == "failure" else ""


def _bar(part: float, width: int) -> str:
    full = round(max(0.0, min(1.0, part)) * width)
    return "█" * full + "░" * (width - full)


def _spark(values: Sequence[float], width: int) -> str:
    """The curve of the values, as high as their range."""
    kept = thin([(float(place), value) for place, value in enumerate(values)], max(width, 8))
    heights = [value for _, value in kept if value is not None][-max(width, 0) :] if width > 0 else []
    if not heights:
        return ""
    low, high = min(heights), max(heights)
    return "".join(_block((value - low) / (high - low) if high > low else 0.5) for value in heights)


def _block(part: float) -> str:
    return _BLOCKS[max(0, min(7, int(part * 8)))]


def _cut(line: str, width: int) -> str:
    """One line that is no longer than `width`."""
    line = plain(line)
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"
