"""The page of all runs of a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from hpctrain.telemetry.report.html import render
from hpctrain.telemetry.report.words import NOTHING, moment, number, whole


@dataclass(frozen=True)
class Row:
    """What is told of a run among others."""

    run_id: str
    state: str
    attempt: int | None = None
    step: int | None = None
    loss: float | None = None
    submitted: float | None = None
    words: str = ""


def address_of(run_id: str) -> str:
    """The path of a run's page; an id with a slash in it, as a task of an array has, stays one word."""
    return f"/run/{quote(run_id, safe='')}"


def render_runs(folder: str, rows: Sequence[Row], *, live_s: int | None = None, left_out: int = 0) -> str:
    """All runs, a line each. See `render`.

    Args:
        folder: where they lie.
        rows: the runs.
        live_s: see `render`.
        left_out: how many others are not shown, for they are links that lead out of the folder.
    """
    shown = [
        {
            "name": row.run_id,
            "address": address_of(row.run_id),
            "state": row.state,
            "attempt": NOTHING if row.attempt is None else row.attempt,
            "step": whole(row.step),
            "loss": number(row.loss),
            "submitted": moment(row.submitted),
            "words": row.words,
        }
        for row in rows
    ]
    data: dict[str, Any] = {"charts": [], "heats": []}
    return render(
        "runs.html.j2",
        title=f"Runs in {folder}",
        data=data,
        folder=folder,
        rows=shown,
        left_out=left_out,
        live_s=live_s,
    )
