"""Several runs as one table for terminals: a line per run, with loss curves on a common scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from hpctrain.telemetry.live.top_view import TopSnapshot, cut_line, sparkline
from hpctrain.text import NOTHING, format_count, format_duration, format_number, pluralize

_CURVE, _WIDEST_NAME = 30, 40
_HEADER = ("RUN", "STATE", "STEP", "LOSS", "LEFT", "CURVE")


def format_overview(snapshots: Sequence[TopSnapshot], width: int, height: int) -> list[tuple[str, str]]:
    """Return the lines of the table, each with its kind: `title`, `soft`, `bad` or none.

    Args:
        snapshots: the runs to show.
        width: columns of the terminal.
        height: lines of the terminal.
    """
    shown = snapshots[: max(1, height - 2)]
    num_more = len(snapshots) - len(shown)
    rows = [_HEADER, *map(_cells, shown)]
    widths = [min(_WIDEST_NAME, max(map(cell_len, column))) for column in zip(*rows, strict=True)]
    drawn = [math.log(loss) for one in shown for loss in one.losses if loss > 0]
    scale = (min(drawn), max(drawn)) if drawn else None
    lines = []
    for number, row in enumerate(rows):
        text = "  ".join(map(set_cell_size, row[:-1], widths))
        kind = "title"
        if number:
            one = shown[number - 1]
            losses = [math.log(loss) for loss in one.losses if loss > 0]
            text += "  " + sparkline(losses, min(_CURVE, width - cell_len(text) - 2), scale)
            kind = "bad" if one.state == "FAILED" else ""
        else:
            text += f"  {row[-1]}"
        lines.append((kind, text.rstrip()))
    if num_more:
        lines.append(("soft", f"{pluralize(num_more, 'more run')}; --filter selects other runs"))
    return [(kind, cut_line(line, width)) for kind, line in lines]


def _cells(one: TopSnapshot) -> tuple[str, ...]:
    step = (
        format_count(one.step)
        if one.last_step is None
        else f"{format_count(one.step)} of {format_count(one.last_step)}"
    )
    left = NOTHING if one.left_s is None else format_duration(one.left_s)
    return one.run_id, one.state, step, format_number(one.loss), left, ""
