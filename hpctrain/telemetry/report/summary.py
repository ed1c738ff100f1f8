"""Summary of a run in sentences: events and their cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hpctrain.telemetry.accounting.metric_fields import describe_step, why_unknown
from hpctrain.telemetry.accounting.time_spans import TimeCategory
from hpctrain.telemetry.hparams import varying_hparams
from hpctrain.telemetry.report.attempts import Attempt
from hpctrain.telemetry.report.run_data import RunData, format_setting
from hpctrain.telemetry.report.run_results import describe_best
from hpctrain.text import format_duration, format_number, format_share, pluralize

#: Short description of each category of the time breakdown.
CATEGORY_TEXT = {
    TimeCategory.TRAINING: "training steps whose result was kept",
    TimeCategory.COMMUNICATING: "waiting for gradients of other ranks",
    TimeCategory.DATA: "waiting for the next batch",
    TimeCategory.VALIDATING: "running validation",
    TimeCategory.SAVING: "training paused for a save",
    TimeCategory.LOADING: "reading a checkpoint",
    TimeCategory.STARTING: "starting the ranks, up to their first step",
    TimeCategory.RESTARTING: "from the exit of the ranks to their restart",
    TimeCategory.LOST: "training steps that were repeated later",
    TimeCategory.QUEUED: "waiting for an allocation",
    TimeCategory.IDLE: "suspended, after the last step, or between submissions",
}
_ENDS = {"failure": "failure", "stop": "stop", "vanished": "lost job", "failed": "failure"}
_FOLLOWED = {
    "restart": "restarted in the same allocation",
    "shrink": "restarted on fewer nodes",
    "replace": "restarted with a replacement node",
    "requeue": "requeued",
    "successor": "continued in another job",
    "submission": "resubmitted",
}


def summarize(run_data: RunData) -> list[str]:
    """Return the first paragraph: progress, interruptions and their cost."""
    if not run_data.breakdown.spans:
        return ["Nothing has been recorded yet."]
    wall = format_duration(run_data.breakdown.wall_us / 1e6)
    attempts = pluralize(len(run_data.attempts), "attempt")
    if run_data.breakdown.knows_lost_work:
        steps = pluralize(run_data.step or 0, "step")
        sentences = [
            f"The run has completed {steps} so far, in {wall} with {attempts}."
            if run_data.is_going
            else f"The run completed {steps} in {wall} with {attempts}."
        ]
    else:
        why = why_unknown(run_data.reports_steps)
        sentences = [
            f"The run has taken {wall} so far, in {attempts}."
            if run_data.is_going
            else f"The run took {wall}, in {attempts}.",
            f"Lost work and productive time are unknown: {why}.",
        ]
    if run_data.cause:
        sentences.append(f"The run failed: {run_data.cause.rstrip('.')}.")
    if (since := run_data.curves.no_number_since("loss")) is not None:
        sentences.append(f"The loss has been {run_data.curves.last_text('loss')} since step {since}.")
    resubmitted = sum(one.end == "cancelled" and one.followed_by is not None for one in run_data.attempts)
    if resubmitted:
        times = "once" if resubmitted == 1 else f"{resubmitted} times"
        sentences.append(f"The run was cancelled and resubmitted {times}.")
    if interruptions := run_data.interruptions:
        sentences.append(_interruption_cost(run_data, interruptions))
    elif len(run_data.attempts) == 1 and not run_data.is_going:
        sentences.append("There were no interruptions.")
    if (ettr := run_data.goodput.ettr) is not None and run_data.step is not None:
        sentences.append(f"{format_share(ettr)} of the time, excluding idle time, was productive (ETTR).")
    return sentences


def _interruption_cost(run_data: RunData, interruptions: Sequence[Attempt]) -> str:
    kinds = Counter(_ENDS[str(attempt.end)] for attempt in interruptions)
    told = ", ".join(pluralize(number_of, kind) for kind, number_of in kinds.items())
    lost_us, away_us = (
        run_data.breakdown.totals_us[TimeCategory.LOST],
        sum(attempt.away_us for attempt in interruptions),
    )
    lost, away, cost = (format_duration(us / 1e6) for us in (lost_us, away_us, lost_us + away_us))
    if not run_data.breakdown.knows_lost_work:
        return f"Interruptions: {told}. They cost {away} of downtime."
    again = pluralize(run_data.breakdown.lost_steps, "step")
    return (
        f"Interruptions: {told}. They cost {cost}: {lost} of lost work ({again} repeated) and {away} of "
        "downtime."
    )


def describe_follow_up(attempt: Attempt) -> str:
    """Return the continuation after the end of an attempt."""
    if attempt.followed_by is None:
        return "the run ended" if attempt.end else "still running"
    return _FOLLOWED.get(attempt.followed_by, attempt.followed_by)


def describe_attempt_end(attempt: Attempt) -> str:
    """Describe the end of an attempt in one sentence or less."""
    if attempt.end is None:
        return "still running"
    return attempt.cause or attempt.end


def describe_attempt_cost(attempt: Attempt) -> str:
    """Return the cost of an attempt's end, if the run was interrupted, and of its staging."""
    if not attempt.interrupted:
        return attempt.staged or ""
    lost = (
        "lost work unknown" if attempt.lost_us is None else f"{format_duration(attempt.lost_us / 1e6)} lost"
    )
    staged = f", {attempt.staged}" if attempt.staged else ""
    return f"{lost}, {format_duration(attempt.away_us / 1e6)} of downtime{staged}"


def key_figures(run_data: RunData) -> list[tuple[str, str, str]]:
    """Return the key figures: name, value and description."""
    lowest = run_data.curves.lowest("loss")
    at = f"lowest {format_number(lowest[1])} at step {lowest[0]:.0f}" if lowest else ""
    if (since := run_data.curves.no_number_since("loss")) is not None:
        at = f"since step {since}{f'; {at}' if at else ''}"
    steps = ("Steps", describe_step(run_data.step, run_data.reports_steps), _rate(run_data))
    productive = (
        "Productive",
        format_share(run_data.goodput.ettr),
        "ETTR: fraction of the time, excluding idle time",
    )
    lost = (
        "Lost work",
        format_duration(run_data.breakdown.totals_us[TimeCategory.LOST] / 1e6),
        f"{pluralize(run_data.breakdown.lost_steps, 'step')} repeated",
    )
    if not run_data.breakdown.knows_lost_work:
        why = why_unknown(run_data.reports_steps)
        steps, productive, lost = ((name, "unknown", why) for name in ("Steps", "Productive", "Lost work"))
    shown = [
        *_best(run_data),
        steps,
        ("Loss", run_data.curves.last_text("loss"), at),
        ("Time", format_duration(run_data.breakdown.wall_us / 1e6), "from submission to " + _until(run_data)),
        ("Attempts", str(len(run_data.attempts)), pluralize(len(run_data.interruptions), "interruption")),
        productive,
        lost,
    ]
    if (energy := run_data.energy) is not None:
        words = f"{format_energy(energy.lost_kwh)} for lost work"
        if energy.per_sample_kwh is not None:
            words += f"; {format_energy(energy.per_sample_kwh)} per sample"
        shown.append(("Energy", format_energy(energy.total_kwh), words))
    if run_data.goodput.mfu is not None:
        shown.append(("MFU", format_share(run_data.goodput.mfu), "model FLOPs utilization"))
    return shown


def format_energy(kwh: float) -> str:
    """Return an energy in a readable unit."""
    units = (("kWh", 1.0), ("Wh", 1e-3), ("mWh", 1e-6))
    unit, size = next((each for each in units if kwh >= each[1]), units[-1])
    return f"{format_number(float(f'{kwh / size:.3g}'))} {unit}"


def _best(run_data: RunData) -> list[tuple[str, str, str]]:
    """Return the best value of the metric that the user optimizes, unless it is the training loss."""
    if (best := run_data.best) is None or best.metric == "loss":
        return []
    return [(best.metric, format_number(best.value), f"best, {describe_best(best)}")]


def _rate(run_data: RunData) -> str:
    return (
        "" if run_data.steps_per_s is None else f"{format_number(run_data.steps_per_s)} per second (median)"
    )


def _until(run_data: RunData) -> str:
    return "now" if run_data.is_going else "the last record"


#: Fields of a specification that are unique to each run.
_OWN = frozenset({"run_id", "run_dir", "code"})


def comparison_rows(runs: Sequence[RunData]) -> list[list[str]]:
    """Return one row per figure: the name, and the value in each run."""
    varying = varying_hparams([run.hparams for run in runs])
    told = [
        {
            **{name: format_setting(run.hparams[name]) for name in varying if name in run.hparams},
            "State": run.state,
            **{name: value for name, value, _ in key_figures(run)},
        }
        for run in runs
    ]
    names = list(dict.fromkeys(name for each in told for name in each))
    return [[name, *(each.get(name, "–") for each in told)] for name in names]


def spec_differences(runs: Sequence[RunData]) -> list[list[str]]:
    """Return the configuration differences: the name of a field, and the value in each run."""
    specs = [
        {
            **{name: format_setting(value) for name, value in run.spec.items() if name not in _OWN},
            **_commit(run),
        }
        for run in runs
    ]
    names = list(dict.fromkeys(name for spec in specs for name in spec))
    rows = [[name, *(spec.get(name, "–") for spec in specs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _commit(run: RunData) -> dict[str, str]:
    if not run.codes:
        return {}
    code = run.codes[-1]
    return {"commit": f"{code.commit}{' with uncommitted changes' if code.changed else ''}"}
