"""Recommend changes that make a run faster or cheaper, each with evidence from measurements."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.telemetry.accounting.time_breakdown import STEP_CATEGORIES
from hpctrain.telemetry.accounting.timeline_events import TimeCategory
from hpctrain.telemetry.report.attempts import describe_straggler
from hpctrain.telemetry.report.device_metrics import NodeSeries
from hpctrain.telemetry.report.run_data import RunData
from hpctrain.telemetry.report.run_results import count_saves
from hpctrain.text import format_duration, format_share, is_finite, pluralize

#: Minimum fractions of the time for a recommendation.
_MUCH_WAITING, _MUCH_SAVING, _MUCH_LOST, _MUCH_THROTTLED = 0.1, 0.05, 0.1, 0.2
#: Shorter runs provide too little evidence.
_MIN_STEPS, _MIN_S = 20, 10.0
#: Ratio of the other nodes' median clock to a node's clock above which the node is slow.
_SLOW_CLOCK_RATIO = 1.1
#: CPU utilization that is high, in per cent, and number of workers per rank above which more rarely help.
_BUSY_PERCENT, _MAX_WORKERS = 90.0, 16


@dataclass(frozen=True)
class Advice:
    what: str
    evidence: str


def advise(run_data: RunData) -> list[Advice]:
    """Return all recommendations with evidence, most important first."""
    checks = [_no_number, _faults, _slow_nodes, _no_checkpoint]
    if len(run_data.curves.effective) >= _MIN_STEPS and _steps_us(run_data) > _MIN_S * 1e6:
        checks += [_data, _saving, _lost_work]
    return [
        Advice(what, f"{(text := '; '.join(evidence))[:1].upper()}{text[1:]}.")
        for check in checks
        for what, evidence in check(run_data)
    ]


#: Recommendations, each with its evidence as phrases.
_Findings = Iterator[tuple[str, Sequence[str]]]


def _steps_us(run_data: RunData) -> int:
    return sum(run_data.breakdown.totals_us[category] for category in STEP_CATEGORIES)


def _uses_trainer(run_data: RunData) -> bool:
    return "settings" in run_data.environment


def _is_local(run_data: RunData) -> bool:
    """True if the run is on this machine, so it cannot request more CPUs or other nodes."""
    return run_data.spec.get("backend") == "local"


def _setting(run_data: RunData, name: str) -> Any:
    settings = run_data.environment.get("settings")
    return settings.get(name) if isinstance(settings, dict) else None


def _no_number(run_data: RunData) -> _Findings:
    """Detect a NaN or infinite loss, which makes all later steps useless."""
    if (since := run_data.curves.no_number_since("loss")) is None:
        return
    change = "Lower the learning rate"
    if not _uses_trainer(run_data):
        change += ", or clip gradients"
    elif _setting(run_data, "gradient_clip_norm") is _setting(run_data, "gradient_clip_value") is None:
        change += ", or clip gradients with Trainer(gradient_clip_norm=1.0)"
    kept_steps = [checkpoint.step for checkpoint in run_data.checkpoints if checkpoint.kept]
    if steps := [step for step in kept_steps if step < since]:
        change += f", then resume from the checkpoint of step {max(steps)}"
    count = pluralize(sum(step >= since for step in run_data.curves.effective), "step")
    yield f"{change}.", [f"the loss is NaN or infinite in {count}, starting at step {since}"]


def _data(run_data: RunData) -> _Findings:
    share = run_data.breakdown.totals_us[TimeCategory.DATA] / _steps_us(run_data)
    if share < _MUCH_WAITING:
        return
    evidence = [f"the ranks spent {format_share(share)} of their step time waiting for data"]
    if (util := run_data.devices.mean("gpu_util")) is not None:
        evidence.append(f"the GPUs were idle {100 - util:.0f}% of the time")
    if (cpu := run_data.devices.mean("cpu")) is not None:
        evidence.append(f"the CPU utilization of the nodes was {cpu:.0f}%")
    workers, cpus = _setting(run_data, "num_workers"), run_data.environment.get("cpus_per_rank")
    if not isinstance(workers, int) or not isinstance(cpus, int):
        change = "Load data faster: use more workers, or do less work per sample."
    elif cpu is not None and cpu >= _BUSY_PERCENT:
        change = "Request more CPUs per rank (--cpus-per-task), or do less work per sample."
        evidence.append(f"num_workers is {workers}")
    elif (num_workers := min(_MAX_WORKERS, max(2, 4 * workers), cpus)) > workers:
        change = f"Set Trainer(num_workers={num_workers}) instead of {workers}."
        evidence.append(f"each rank has {pluralize(cpus, 'CPU')}")
    else:
        change = f"Request more CPUs per rank (--cpus-per-task), and increase num_workers from {workers}."
        evidence.append(f"each rank has only {pluralize(cpus, 'CPU')}")
    if _is_local(run_data) and change.startswith("Request"):
        change = "Do less work per sample."
    yield change, evidence


def _faults(run_data: RunData) -> _Findings:
    """Detect GPUs that have failed or are likely to fail."""
    for node in run_data.devices.nodes:
        evidence = []
        if node.xids:
            evidence.append(f"the driver reported {', '.join(f'Xid {xid}' for xid in node.xids)}")
        if node.ecc_errors:
            evidence.append(pluralize(node.ecc_errors, "uncorrected memory error"))
        if evidence:
            change = f"Ask the administrator to check the GPUs of {node.host}"
            if not _is_local(run_data):
                change += f", and exclude the node until then: --exclude {node.host}"
            yield f"{change}.", evidence


def _slow_nodes(run_data: RunData) -> _Findings:
    """Detect nodes that slow down every step of all other nodes."""
    # A single slow interval may be accidental; the supervisor marks lasting stragglers.
    stragglers = {
        event.host: describe_straggler(event)
        for event in run_data.events
        if event.kind == "straggler" and event.host and event.lasting
    }
    clocks = {node.host: node.clock_mhz for node in run_data.devices.nodes if node.clock_mhz}
    for node in run_data.devices.nodes:
        evidence = [stragglers.pop(node.host)] if node.host in stragglers else []
        other_clocks = [clock for host, clock in clocks.items() if host != node.host]
        typical = statistics.median(other_clocks) if other_clocks else 0.0
        if node.clock_mhz and typical / node.clock_mhz >= _SLOW_CLOCK_RATIO:
            evidence.append(
                f"its GPUs ran at {node.clock_mhz:.0f} MHz, but those of other nodes at {typical:.0f} MHz "
                f"({typical / node.clock_mhz:.1f} times as fast)"
            )
        if evidence:
            yield _exclude(run_data, node.host), [*evidence, *_throttled(node)]
        elif reasons := _throttled(node):
            yield f"Check the cooling and power supply of {node.host}.", reasons
    for host, straggler in stragglers.items():
        yield _exclude(run_data, host), [straggler]


def _exclude(run_data: RunData, host: str) -> str:
    num_nodes = max((attempt.nodes or 1 for attempt in run_data.attempts), default=1)
    if num_nodes > 1 and not _is_local(run_data):
        return f"{host} is slow and delays all other nodes. Exclude it with --exclude {host}."
    return "A rank is slow and delays all other ranks. Find the cause with `hpctrain profile`."


def _throttled(node: NodeSeries) -> list[str]:
    """Return the reasons for significant throttling; reaching the power cap is normal."""
    reasons = [
        f"{reason} ({format_share(share)} of the time)"
        for reason, share in node.throttled.items()
        if share >= _MUCH_THROTTLED and reason not in ("power cap", "clock setting", "sync boost")
    ]
    return [f"its GPU clocks were lowered: {', '.join(reasons)}"] if reasons else []


def _saving(run_data: RunData) -> _Findings:
    saving_us = run_data.breakdown.totals_us[TimeCategory.SAVING]
    share = saving_us / (saving_us + _steps_us(run_data))
    num_saves = count_saves(run_data.checkpoints)
    if share < _MUCH_SAVING or num_saves < 3:
        return
    if not _uses_trainer(run_data):
        change = "Save less often, or in the background: with hpctrain.Checkpointer, call async_save()."
    elif _setting(run_data, "checkpoint_async") is False:
        change = "Set Trainer(checkpoint_async=True), so that training pauses only while the state is copied."
    elif _setting(run_data, "checkpoint_every") == "auto":
        if _setting(run_data, "local_checkpoints") is not None:
            return
        change = "Save to a fast local folder first: Trainer(local_checkpoints='auto')."
    else:
        change = "Save less often: set Trainer(checkpoint_every='auto') for an optimal interval."
    saves = f"{pluralize(num_saves, 'save')} paused training for {format_duration(saving_us / 1e6)}"
    yield change, [saves, f"that is {format_share(share)} of the training time"]


def _no_checkpoint(run_data: RunData) -> _Findings:
    """Detect a script that saves nothing. The Trainer saves by itself."""
    restarts = sum(event.starts_over is True for event in run_data.events)
    if restarts and not _uses_trainer(run_data) and not run_data.has_saved:
        count = pluralize(restarts, "restart")
        consequence = (
            f"every restart starts over, unless it loads a checkpoint from elsewhere ({count} so far)"
        )
        yield (
            "Save checkpoints in $HPCTRAIN_RUN_DIR/checkpoints, and load the newest one at the start.",
            [f"this script saved no checkpoint there, so {consequence}"],
        )


def _lost_work(run_data: RunData) -> _Findings:
    lost_us = run_data.breakdown.totals_us[TimeCategory.LOST]
    share = lost_us / (lost_us + _steps_us(run_data))
    interval = _setting(run_data, "checkpoint_every")
    if share < _MUCH_LOST or interval == "auto" or not (run_data.has_saved or _uses_trainer(run_data)):
        return
    num_lossy = sum(bool(attempt.lost_us) for attempt in run_data.interruptions)
    evidence = [f"{format_share(share)} of the work was lost in {pluralize(num_lossy, 'interruption')}"]
    if is_finite(interval):
        evidence.append(f"checkpoints were saved every {interval:g} steps")
    change = "Save more often: set Trainer(checkpoint_every='auto') for an optimal interval."
    yield change if _uses_trainer(run_data) else "Save checkpoints more often.", evidence
