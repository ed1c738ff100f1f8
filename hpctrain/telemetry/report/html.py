"""Filling in a page: one file that needs nothing else, and in which nothing of a run can be executed."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from hpctrain import __version__
from hpctrain.telemetry.report.words import moment

_ASSETS = Path(__file__).resolve().parents[1] / "assets"
_MOST_DIFF_LINES = 3000


def render(
    template: str, *, title: str, data: Mapping[str, Any], live_s: int | None = None, **context: Any
) -> str:
    """Fill a template in; everything of the run is escaped, or stands in a block of JSON.

    Args:
        template: its name among the assets.
        title: of the page.
        data: what the page's script draws.
        live_s: after how many seconds the page asks its server for what is new; None never asks.
        context: what else the template uses.
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
    environment.filters["diff_lines"] = _diff_lines
    style = _asset("uPlot.min.css") + _asset("report.css")
    library, script = _asset("uPlot.iife.min.js"), _asset("report.js")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src {_hash(library)} {_hash(script)}",
            f"style-src {_hash(style)}",
            *(["connect-src 'self'"] if live_s else []),
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    return environment.get_template(template).render(
        title=title,
        policy=Markup(policy),
        style=Markup(style),
        library=Markup(library),
        script=Markup(script),
        data=Markup(_as_script_data(data)),
        version=__version__,
        made=moment(time.time()),
        zone=time.strftime("%Z"),
        live_s=live_s,
        has_charts=bool(data["charts"]),
        **context,
    )


def _diff_lines(diff: str) -> Iterator[tuple[str, str]]:
    kinds = {"+": "plus", "-": "minus", "@": "at", "d": "at", "i": "at"}
    lines = diff.splitlines()
    for line in lines[:_MOST_DIFF_LINES]:
        yield kinds.get(line[:1], ""), line or " "
    if len(lines) > _MOST_DIFF_LINES:
        yield "at", f"… {len(lines) - _MOST_DIFF_LINES} more lines"


@cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a content security policy calls a script or style sheet (W3C, CSP Level 3, section 2.3.1)."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _as_script_data(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element: no end of it, and no comment, can be in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
