"""Page that lists all runs of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hpctrain.telemetry.report.html_renderer import render_page
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


def run_url(run_id: str | None) -> str:
    """Return the path of a run's page. The id of an array task contains a slash, which is escaped.

    None is the page of all runs.
    """
    return "/" if run_id is None else f"/run/{quote(run_id, safe='')}"


def render_index_page(
    folder: str, rows: Sequence[RunRow], *, live_s: int | None = None, num_omitted: int = 0
) -> str:
    """Return the page of all runs, with one row per run. See `render_page`.

    Args:
        folder: the parent folder of the runs.
        rows: the runs.
        live_s: see `render_page`.
        num_omitted: number of omitted runs, which are links out of the folder.
    """
    shown = [
        {
            "name": row.run_id,
            "address": run_url(row.run_id),
            "state": row.state,
            "attempt": NOTHING if row.attempt is None else row.attempt,
            "step": "not reported" if row.reports_steps is False else format_count(row.step),
            "loss": format_number(row.loss),
            "submitted": format_time(row.submitted),
            "words": row.words,
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
        live_s=live_s,
    )
