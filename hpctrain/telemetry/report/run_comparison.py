"""Comparison of several runs."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.telemetry.report.run_data import RunData, format_setting
from hpctrain.telemetry.report.summary import key_figures

#: Fields of a specification that are unique to each run.
_OWN = frozenset({"run_id", "run_dir", "code"})


def comparison_rows(runs: Sequence[RunData]) -> list[list[str]]:
    """Return one row per figure: its name, and its value in each run."""
    told = [{"State": run.state, **{name: value for name, value, _ in key_figures(run)}} for run in runs]
    names = list(dict.fromkeys(name for each in told for name in each))
    return [[name, *(each.get(name, "–") for each in told)] for name in names]


def spec_differences(runs: Sequence[RunData]) -> list[list[str]]:
    """Return the configuration differences: the name of a field, and its value in each run."""
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
    return {"commit": f"{code.commit}{' with changes' if code.changed else ''}"}
