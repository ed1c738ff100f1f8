"""Several runs side by side."""

from __future__ import annotations

import json
from collections.abc import Sequence

from hpctrain.telemetry.report.facts import Facts
from hpctrain.telemetry.report.story import figures

#: Fields of a specification that differ between any two runs.
_OWN = frozenset({"run_id", "run_dir", "code"})


def side_by_side(runs: Sequence[Facts]) -> list[list[str]]:
    """A row for each figure: its name, and its value in each run."""
    told = [{"State": run.state, **{name: value for name, value, _ in figures(run)}} for run in runs]
    names = list(dict.fromkeys(name for each in told for name in each))
    return [[name, *(each.get(name, "–") for each in told)] for name in names]


def differences(runs: Sequence[Facts]) -> list[list[str]]:
    """What was asked for differently: the name of a field, and its value in each run."""
    specs = [
        {**{name: _plain(value) for name, value in run.spec.items() if name not in _OWN}, **_commit(run)}
        for run in runs
    ]
    names = list(dict.fromkeys(name for spec in specs for name in spec))
    rows = [[name, *(spec.get(name, "–") for spec in specs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _commit(run: Facts) -> dict[str, str]:
    if not run.codes:
        return {}
    code = run.codes[-1]
    return {"commit": f"{code.commit}{' with changes' if code.changed else ''}"}


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
