"""Render self-contained HTML pages in which content of a run cannot be executed."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from hpctrain._version import __version__
from hpctrain.telemetry.accounting.time_breakdown import TimeBreakdown
from hpctrain.telemetry.report.metric_curves import CurvePoint, downsample
from hpctrain.telemetry.report.run_data import format_setting
from hpctrain.text import (
    format_clock,
    format_duration,
    format_number,
    format_share,
    format_size,
    format_time,
    pluralize,
)

_ASSETS = Path(__file__).resolve().parents[1] / "assets"
#: The script of the page cannot add larger values without overflow.
_LARGEST = 1e300
#: Maximum number of points of a curve: more than the pixel columns of a screen.
_MAX_POINTS = 2000


@dataclass(frozen=True)
class LiveParts:
    """Parts of a page that only `hpctrain serve` shows."""

    interval_s: int
    """Seconds between two polls of the server for updates."""
    logs: Sequence[tuple[str, str]] = ()
    """Names of logs, each with its last lines."""


def page_url(run_ids: Sequence[str]) -> str:
    """Return the path of the page of a run, or of the comparison of several; without runs, of the list.

    The id of an array task contains a slash, which is escaped.
    """
    if len(run_ids) > 1:
        return f"/compare?{urlencode([('run', run_id) for run_id in run_ids])}"
    return f"/run/{quote(run_ids[0], safe='')}" if run_ids else "/"


def chart(
    identity: str,
    title: str,
    curves: Sequence[Mapping[str, Any]],
    *,
    axis: str = "step",
    height: int = 150,
    note: str = "",
    marks: Sequence[tuple[float, str]] = (),
) -> dict[str, Any]:
    """Return a chart for the script of the page. `marks` are vertical lines with labels."""
    return {
        "id": identity,
        "title": title,
        "note": note,
        "axis": axis,
        "height": height,
        "series": curves,
        "marks": [{"x": x, "label": label} for x, label in marks],
    }


def curve(
    name: str,
    points: Sequence[CurvePoint],
    not_finite: Sequence[tuple[int, str]] = (),
    *,
    faint: bool = False,
) -> dict[str, Any]:
    """Return a curve of a chart, with labels for NaN or infinite points."""
    kept = downsample(points, _MAX_POINTS)
    xs = [x for x, _ in kept]
    drawn = set(xs)
    return {
        "name": name,
        "x": xs,
        "y": [y if y is None else min(max(y, -_LARGEST), _LARGEST) for _, y in kept],
        "not_finite": [[x, text] for x, text in not_finite if x in drawn],
        "faint": faint,
    }


def time_breakdown_rows(breakdown: TimeBreakdown) -> list[dict[str, Any]]:
    """Return each category with its share and duration; empty if the run has no time."""
    return [
        {
            "name": category.value,
            "kind": category.name.lower(),
            "us": us,
            "is_measured": (is_measured := category in breakdown.measured),
            "share": format_share(us / breakdown.wall_us if is_measured else None),
            "duration": format_duration(us / 1e6 if is_measured else None),
        }
        for category, us in breakdown.totals_us.items()
        if breakdown.wall_us
    ]


def render_page(
    template: str,
    *,
    title: str,
    charts: Sequence[Mapping[str, Any]] = (),
    live: LiveParts | None = None,
    **context: Any,
) -> str:
    """Render a template; all content of the run is escaped, or part of a JSON block.

    The script of the page draws the charts. `live` is set for pages of `hpctrain serve`.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_ASSETS),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "clock": format_clock,
        "duration": format_duration,
        "number": format_number,
        "page_url": lambda run_id: page_url([run_id]),
        "plural": pluralize,
        "setting": format_setting,
        "size": format_size,
    }
    style = _asset("uPlot.min.css") + _asset("report.css")
    library, script = _asset("uPlot.iife.min.js"), _asset("report.js")
    targets = "connect-src 'self'; form-action 'self'" if live else "form-action 'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(script)}; style-src {_hash(style)}; "
        f"{targets}; base-uri 'none'"
    )
    return environment.get_template(template).render(
        title=title,
        policy=Markup(policy),
        style=Markup(style),
        library=Markup(library),
        script=Markup(script),
        data=Markup(_as_script_data({"charts": charts})),
        charts=charts,
        version=__version__,
        made=format_time(time.time()),
        zone=time.strftime("%Z"),
        live=live,
        **context,
    )


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """Return the CSP hash source of a script or style sheet (W3C, CSP Level 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _as_script_data(data: Mapping[str, Any]) -> str:
    """Return JSON that is safe in a script element: it cannot contain an end tag or a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
