"""Page that lists all runs of a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpctrain.telemetry.hparams import HparamValue
from hpctrain.telemetry.report.html_renderer import LiveParts, render_page
from hpctrain.text import NOTHING, format_count, format_number, format_time


@dataclass(frozen=True)
class RunRow:
    """A row of the list of runs."""

    run_id: str
    state: str
    attempt: int | None = None
    step: int | None = None
    loss: float | None = None
    reports_steps: bool | None = None
    submitted: float | None = None
    words: str = ""
    hparams: Mapping[str, HparamValue] = field(default_factory=dict)


def render_index_page(
    folder: str, rows: Sequence[RunRow], *, live: LiveParts | None = None, num_omitted: int = 0
) -> str:
    """Return the page of all runs, with one row per run. See `render_page`.

    Args:
        folder: the parent folder of the runs.
        rows: the runs.
        live: see `render_page`.
        num_omitted: number of omitted runs, which are links out of the folder.
    """
    shown = [
        {
            "name": row.run_id,
            "state": row.state,
            "attempt": NOTHING if row.attempt is None else row.attempt,
            "step": "not reported" if row.reports_steps is False else format_count(row.step),
            "loss": format_number(row.loss),
            "submitted": format_time(row.submitted),
            "words": " ".join([row.words, *(f"{name}={value}" for name, value in row.hparams.items())]),
        }
        for row in rows
    ]
    data: dict[str, Any] = {"charts": [], "heats": []}
    return render_page(
        "runs.html.j2",
        title=f"Runs in {folder}",
        data=data,
        folder=folder,
        rows=shown,
        num_omitted=num_omitted,
        live=live,
    )
