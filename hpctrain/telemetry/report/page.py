"""The page of one run."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpctrain.telemetry.ledger import Ledger
from hpctrain.telemetry.report.advice import advise
from hpctrain.telemetry.report.attempts import Attempt
from hpctrain.telemetry.report.curves import Point, thin
from hpctrain.telemetry.report.devices import COLUMNS, HeatMap, Node
from hpctrain.telemetry.report.facts import Facts
from hpctrain.telemetry.report.html import render
from hpctrain.telemetry.report.lines import without_collecting
from hpctrain.telemetry.report.pieces import Checkpoint
from hpctrain.telemetry.report.story import (
    MEANING,
    figures,
    how_it_ended,
    story,
    what_followed,
    what_it_cost,
)
from hpctrain.telemetry.report.timeline import WIDTH, draw
from hpctrain.telemetry.report.words import NOTHING, clock, count, duration, moment, number, share, size

#: Points of a large chart: more than a screen has columns.
_MOST_POINTS, _MOST_SMALL_POINTS = 4000, 1000
_MOST_METRICS = 24
_MOST_ROWS = 200


@without_collecting()
def render_report(facts: Facts, *, live_s: int | None = None) -> str:
    """The page of one run. See `render`."""
    charts: list[dict[str, Any]] = []
    loss = _loss(facts, charts)
    rate = _rate(facts, charts)
    names = [name for name in facts.curves.names if name != "loss"]
    metrics = [_metric(facts, name, place, charts) for place, name in enumerate(names[:_MOST_METRICS])]
    attempts = _first_and_last(facts.attempts)
    timeline = draw(facts) if facts.ledger.spans else None
    heats = list(_heats(facts))
    return render(
        "report.html.j2",
        live_s=live_s,
        title=f"{facts.run_id} · {facts.state}",
        data={"charts": charts, "heats": [{**heat, "means": None} for heat in heats]},
        facts=facts,
        subtitle=_subtitle(facts),
        story=story(facts),
        figures=figures(facts),
        loss=loss,
        rate=rate,
        metrics=metrics,
        metrics_left_out=names[_MOST_METRICS:],
        timeline=timeline,
        drawn={bar.kind for bar in timeline.time.bars} if timeline else set(),
        has_faults=any(one.end in ("failure", "vanished", "failed") for one in facts.attempts),
        has_stops=any(one.end == "stop" for one in facts.attempts),
        ledger=ledger_rows(facts.ledger),
        wall=duration(facts.ledger.wall_us / 1e6),
        attempts=[_attempt(one) for one in attempts],
        attempts_left_out=len(facts.attempts) - len(attempts),
        heats=heats,
        nodes=[_node(one) for one in facts.devices.nodes],
        advice=advise(facts),
        environment=_environment(facts),
        checkpoints=[_checkpoint(one) for one in facts.checkpoints[:-13:-1]],
        checkpoint_words=_checkpoint_words(facts.checkpoints),
        spec=[(name, _plain(value)) for name, value in facts.spec.items()],
    )


def ledger_rows(ledger: Ledger) -> list[dict[str, Any]]:
    """Each share with its words and its place in a bar; none where there is no time to share."""
    rows: list[dict[str, Any]] = []
    done = 0
    for what, us in ledger.totals_us.items() if ledger.wall_us else ():
        rows.append(
            {
                "name": what.value,
                "kind": what.name.lower(),
                "us": us,
                "x": round(WIDTH * done / ledger.wall_us, 3),
                "width": round(WIDTH * us / ledger.wall_us, 3),
                "share": share(us / ledger.wall_us),
                "duration": duration(us / 1e6),
                "meaning": MEANING[what],
                "measured": what in ledger.measured,
            }
        )
        done += us
    return rows


def series(name: str, points: Sequence[Point], most: int, **more: Any) -> dict[str, Any]:
    """A curve as the page's script takes it."""
    kept = thin(points, most)
    return {"name": name, "x": [x for x, _ in kept], "y": [y for _, y in kept], **more}


def _loss(facts: Facts, charts: list[dict[str, Any]]) -> dict[str, Any] | None:
    points = facts.curves.points("loss")
    if not points:
        return None
    shown = [series("loss", points, _MOST_POINTS)]
    if again := facts.curves.points("loss", facts.curves.again):
        shown.append(series("before it was trained again", again, _MOST_POINTS, faint=True))
    marks = _restarts(facts)
    charts.append(
        {"id": "loss-chart", "axis": "step", "height": 340, "series": shown, "marks": marks, "log": False}
    )
    restarts = "Dashed lines: where ranks that were started again went on. " if marks else ""
    lost = "Faint: steps that were trained again." if again else ""
    return {
        "id": "loss-chart",
        "title": "Loss",
        "what": "mean over the global batch, by optimizer step",
        "note": restarts + lost or "Nothing interrupted it.",
        "log": True,
    }


def _restarts(facts: Facts) -> list[dict[str, Any]]:
    """Where the ranks went on: after which step, and in which starts."""
    starts: dict[int, list[str]] = {}
    for attempt in facts.attempts[1:]:
        step = attempt.resumed_step if attempt.resumed_step is not None else _before(attempt)
        if step is not None:
            starts.setdefault(step, []).append(str(attempt.number))
    return [
        {"x": step, "label": f"start{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"}
        for step, numbers in starts.items()
    ]


def _before(attempt: Attempt) -> int | None:
    return None if attempt.first_step is None else attempt.first_step - 1


def _rate(facts: Facts, charts: list[dict[str, Any]]) -> dict[str, Any] | None:
    if not facts.rates:
        return None
    shown = [series("steps a second", facts.rates, _MOST_POINTS)]
    marks = [
        {"x": attempt.started - facts.start, "label": f"start {attempt.number}"}
        for attempt in facts.attempts[1:]
    ]
    charts.append({"id": "rate", "axis": "time", "height": 220, "series": shown, "marks": marks})
    return {
        "id": "rate",
        "title": "Steps a second, by time since the submission",
        "note": f"the median is {number(facts.steps_per_s)}",
    }


def _metric(facts: Facts, name: str, place: int, charts: list[dict[str, Any]]) -> dict[str, Any]:
    points = facts.curves.points(name)
    identity = f"metric-{place}"
    shown = [series(name, points, _MOST_SMALL_POINTS)]
    charts.append({"id": identity, "axis": "step", "height": 150, "series": shown})
    return {"id": identity, "title": f"{name}: {number(facts.curves.last(name))}", "log": False}


def _heats(facts: Facts) -> Iterator[dict[str, Any]]:
    """The maps of the GPUs and those of the nodes, where anything was measured."""
    devices = facts.devices
    hosts = [node.host for node in devices.nodes]
    for identity, rows, maps in (
        ("heat", devices.rows, devices.maps),
        ("nodes-heat", hosts, devices.node_maps),
    ):
        if maps:
            yield _heat(identity, rows, maps, facts.end - facts.start)


def _heat(identity: str, rows: Sequence[str], maps: Sequence[HeatMap], seconds: float) -> dict[str, Any]:
    return {
        "id": identity,
        "rows": rows,
        "columns": COLUMNS,
        "seconds": seconds,
        "maps": [
            {
                "name": each.quantity.name,
                "unit": each.quantity.unit,
                "most": each.most,
                "cells": base64.b64encode(each.cells).decode(),
            }
            for each in maps
        ],
        "means": [
            [row, *(number(_rounded(each.means[index])) for each in maps)] for index, row in enumerate(rows)
        ],
    }


def _node(node: Node) -> dict[str, Any]:
    kinds = Counter(node.gpu_names)
    troubles = [f"Xid {xid}" for xid in node.xids]
    if node.ecc_errors:
        troubles.append(count(node.ecc_errors, "memory error"))
    troubles += [f"clock lowered by {reason}: {share(part)}" for reason, part in node.throttled.items()]
    return {
        "host": node.host,
        "gpus": ", ".join(f"{number_of} × {name}" for name, number_of in kinds.items()) or NOTHING,
        "cpus": NOTHING if node.cpus is None else node.cpus,
        "memory": size(node.memory_bytes),
        "troubles": ", ".join(troubles),
    }


def _environment(facts: Facts) -> list[tuple[str, str]]:
    """What the ranks ran on, and then the settings of the training."""
    known = {name: value for name, value in facts.environment.items() if name not in ("time", "attempt")}
    settings = known.pop("settings", None)
    rows = [*known.items(), *(settings.items() if isinstance(settings, dict) else ())]
    return [(str(name), _plain(value)) for name, value in rows if value is not None]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _subtitle(facts: Facts) -> str:
    spec, parts = facts.spec, []
    if script := spec.get("script"):
        parts.append(" ".join([Path(str(script)).name, *map(str, spec.get("args") or ())])[:200])
    if attempt := next((one for one in reversed(facts.attempts) if one.world_size), None):
        parts.append(f"{count(attempt.world_size, 'rank')} on {count(attempt.nodes, 'node')}")
    if facts.ledger.spans:
        parts.append(f"{moment(facts.start)} to {'now' if facts.is_going else moment(facts.end)}")
    if facts.words:
        parts.append(facts.words)
    return " · ".join(parts)


def _attempt(attempt: Attempt) -> dict[str, Any]:
    first, last = attempt.first_step, attempt.last_step
    return {
        "number": attempt.number,
        "started": clock(attempt.started),
        "steps": "–" if first is None else f"{first} – {last}",
        "ended": how_it_ended(attempt),
        "log": attempt.log if attempt.end == "failure" else None,
        "then": what_followed(attempt),
        "cost": what_it_cost(attempt),
    }


def _first_and_last(attempts: Sequence[Attempt]) -> list[Attempt]:
    if len(attempts) <= _MOST_ROWS:
        return list(attempts)
    return [*attempts[: _MOST_ROWS // 2], *attempts[-_MOST_ROWS // 2 :]]


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    words = [*(["kept"] if checkpoint.kept else []), *(["fast folder"] if checkpoint.tier == "local" else [])]
    return {
        "step": "–" if checkpoint.step is None else checkpoint.step,
        "when": clock(checkpoint.time),
        "size": size(checkpoint.num_bytes),
        "seconds": duration(checkpoint.seconds),
        "stall": duration(checkpoint.seconds if checkpoint.stall_s is None else checkpoint.stall_s),
        "words": ", ".join(words),
    }


def _checkpoint_words(checkpoints: Sequence[Checkpoint]) -> str:
    kept = len({one.step for one in checkpoints if one.kept})
    shown = " The last twelve:" if len(checkpoints) > 12 else ""
    return f"{count(len(checkpoints), 'checkpoint')} written, {kept} of them still there.{shown}"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
