"""Summarize a run in sentences and key figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpctrain.telemetry.accounting.timeline_events import TimeCategory
from hpctrain.telemetry.report.attempts import Attempt
from hpctrain.telemetry.report.metric_curves import describe_step, why_unknown
from hpctrain.telemetry.report.run_data import RunData
from hpctrain.telemetry.report.run_results import describe_best
from hpctrain.text import format_duration, format_number, format_share, pluralize

_ENDS = {"failure": "failure", "stop": "stop", "vanished": "lost job", "failed": "failure"}
_FOLLOW_UPS = {
    "restart": "restarted in the same allocation",
    "shrink": "restarted on fewer nodes",
    "replace": "restarted with a replacement node",
    "requeue": "requeued",
    "successor": "continued in another job",
    "submission": "resubmitted",
}


def summarize(run_data: RunData) -> list[str]:
    """Return the first paragraph: progress, interruptions and their cost."""
    breakdown = run_data.breakdown
    if not breakdown.spans:
        return ["Nothing has been recorded yet."]
    wall = format_duration(breakdown.wall_us / 1e6)
    attempts = pluralize(len(run_data.attempts), "attempt")
    so_far = " so far" if run_data.is_going else ""
    if breakdown.knows_lost_work:
        verb = "has completed" if run_data.is_going else "completed"
        steps = pluralize(run_data.step or 0, "step")
        sentences = [f"The run {verb} {steps}{so_far and f'{so_far},'} in {wall} with {attempts}."]
    else:
        verb = "has taken" if run_data.is_going else "took"
        sentences = [
            f"The run {verb} {wall}{so_far}, in {attempts}.",
            f"Lost work and productive time are unknown: {why_unknown(run_data.reports_steps)}.",
        ]
    if run_data.cause:
        sentences.append(f"The run failed: {run_data.cause.rstrip('.')}.")
    if (since := run_data.curves.no_number_since("loss")) is not None:
        sentences.append(f"The loss has been {run_data.curves.last_text('loss')} since step {since}.")
    if num := sum(attempt.end == "cancelled" and bool(attempt.followed_by) for attempt in run_data.attempts):
        sentences.append(f"The run was cancelled and resubmitted {'once' if num == 1 else f'{num} times'}.")
    if interruptions := run_data.interruptions:
        sentences.append(_interruption_cost(run_data, interruptions))
    elif len(run_data.attempts) == 1 and not run_data.is_going:
        sentences.append("There were no interruptions.")
    if (ettr := run_data.goodput.ettr) is not None and run_data.step is not None:
        sentences.append(f"{format_share(ettr)} of the time, excluding idle time, was productive (ETTR).")
    return sentences


def _interruption_cost(run_data: RunData, interruptions: Sequence[Attempt]) -> str:
    counts = Counter(_ENDS[str(attempt.end)] for attempt in interruptions)
    kinds = ", ".join(pluralize(count, kind) for kind, count in counts.items())
    lost_us = run_data.breakdown.totals_us[TimeCategory.LOST]
    away_us = sum(attempt.away_us for attempt in interruptions)
    lost, away, cost = (format_duration(us / 1e6) for us in (lost_us, away_us, lost_us + away_us))
    if not run_data.breakdown.knows_lost_work:
        return f"Interruptions: {kinds}. They cost {away} of downtime."
    repeated = pluralize(run_data.breakdown.lost_steps, "step")
    return (
        f"Interruptions: {kinds}. They cost {cost}: {lost} of lost work ({repeated} repeated) and {away} of "
        "downtime."
    )


def describe_follow_up(attempt: Attempt) -> str:
    if attempt.followed_by is None:
        return "the run ended" if attempt.end else "still running"
    return _FOLLOW_UPS.get(attempt.followed_by, attempt.followed_by)


def describe_attempt_end(attempt: Attempt) -> str:
    return (attempt.cause or attempt.end) if attempt.end else "still running"


def describe_attempt_cost(attempt: Attempt) -> str:
    """Return the cost of an attempt's end, if the run was interrupted, and of its staging."""
    costs = []
    if attempt.interrupted:
        lost_us = attempt.lost_us
        costs.append("lost work unknown" if lost_us is None else f"{format_duration(lost_us / 1e6)} lost")
        costs.append(f"{format_duration(attempt.away_us / 1e6)} of downtime")
    return ", ".join([*costs, *([attempt.staged] if attempt.staged else [])])


def key_figures(run_data: RunData) -> list[tuple[str, str, str]]:
    breakdown, curves, goodput, best = run_data.breakdown, run_data.curves, run_data.goodput, run_data.best
    since, lowest, rate = curves.no_number_since("loss"), curves.lowest("loss"), run_data.steps_per_s
    loss_notes = [] if since is None else [f"since step {since}"]
    if lowest:
        loss_notes.append(f"lowest {format_number(lowest[1])} at step {lowest[0]:.0f}")
    if breakdown.knows_lost_work:
        per_s = "" if rate is None else f"{format_number(rate)} per second (median)"
        steps = ("Steps", describe_step(run_data.step, run_data.reports_steps), per_s)
        ettr = ("Productive", format_share(goodput.ettr), "ETTR: fraction of the time, excluding idle time")
        lost_s = breakdown.totals_us[TimeCategory.LOST] / 1e6
        lost = ("Lost work", format_duration(lost_s), f"{pluralize(breakdown.lost_steps, 'step')} repeated")
    else:
        reason = why_unknown(run_data.reports_steps)
        steps, ettr, lost = ((name, "unknown", reason) for name in ("Steps", "Productive", "Lost work"))
    until = "now" if run_data.is_going else "the last record"
    figures = [
        steps,
        ("Loss", curves.last_text("loss"), "; ".join(loss_notes)),
        ("Time", format_duration(breakdown.wall_us / 1e6), f"from submission to {until}"),
        ("Attempts", str(len(run_data.attempts)), pluralize(len(run_data.interruptions), "interruption")),
        ettr,
        lost,
    ]
    if best is not None and best.metric != "loss":
        figures.insert(0, (best.metric, format_number(best.value), f"best, {describe_best(best)}"))
    if (energy := run_data.energy) is not None:
        note = f"{_format_energy(energy.lost_kwh)} for lost work"
        if energy.per_sample_kwh is not None:
            note += f"; {_format_energy(energy.per_sample_kwh)} per sample"
        figures.append(("Energy", _format_energy(energy.total_kwh), note))
    if goodput.mfu is not None:
        figures.append(("MFU", format_share(goodput.mfu), "model FLOPs utilization"))
    return figures


def _format_energy(kwh: float) -> str:
    units = (("kWh", 1.0), ("Wh", 1e-3), ("mWh", 1e-6))
    unit, size = next((pair for pair in units if kwh >= pair[1]), units[-1])
    return f"{format_number(float(f'{kwh / size:.3g}'))} {unit}"
