"""Report as Markdown, for a chat, an issue or a repository."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hpctrain.telemetry.report.advice import advise
from hpctrain.telemetry.report.run_data import RunData
from hpctrain.telemetry.report.run_page import time_breakdown_rows
from hpctrain.telemetry.report.summary import (
    comparison_rows,
    describe_attempt_cost,
    describe_attempt_end,
    describe_follow_up,
    key_figures,
    spec_differences,
    summarize,
)
from hpctrain.text import format_clock, format_duration, printable

#: Characters with a meaning in Markdown or HTML.
_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$])")


def markdown_report(run_data: RunData) -> str:
    """Return the report of one run."""
    parts = [
        f"# {_safe(run_data.run_id)}: {_safe(run_data.state)}",
        " ".join(map(_safe, summarize(run_data))),
        *map(_safe, run_data.notes),
        _table(("", "", ""), key_figures(run_data)),
        "## Time breakdown",
        _ledger(run_data),
    ]
    if run_data.attempts:
        rows = [
            (
                one.number,
                format_clock(one.started),
                describe_attempt_end(one),
                describe_follow_up(one),
                describe_attempt_cost(one),
            )
            for one in run_data.attempts
        ]
        parts += ["## Timeline", _table(("attempt", "started", "end", "follow-up", "cost"), rows)]
    if advice := advise(run_data):
        told = [(one.what, one.evidence) for one in advice]
        parts += ["## Recommendations", _table(("recommendation", "evidence"), told)]
    if run_data.resubmit_command:
        # The fence must be longer than any run of backticks inside.
        longest = max(map(len, re.findall(r"`*", "\n".join(run_data.resubmit_command))))
        fence = "`" * max(3, longest + 1)
        parts += [
            "## Reproduce this run",
            "\n".join([fence + "bash", *map(printable, run_data.resubmit_command), fence]),
        ]
    return "\n\n".join(parts) + "\n"


def markdown_comparison(runs: Sequence[RunData]) -> str:
    """Return the comparison of several runs."""
    names = [run.run_id for run in runs]
    parts = ["# " + ", ".join(map(_safe, names)), _table(("", *names), comparison_rows(runs))]
    if rows := spec_differences(runs):
        parts += ["## Configuration differences", _table(("", *names), rows)]
    return "\n\n".join(parts) + "\n"


def _ledger(run_data: RunData) -> str:
    rows = [
        (row["name"], row["share"], row["duration"], row["meaning"])
        if row["measured"]
        else (row["name"], "–", "–", "not measured; included in training")
        for row in time_breakdown_rows(run_data.breakdown)
    ]
    return _table(("", "share", "time", ""), [*rows, ("total", "100%", _wall(run_data), "")])


def _wall(run_data: RunData) -> str:
    return format_duration(run_data.breakdown.wall_us / 1e6)


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell if cell == "---" else _safe(cell) for cell in line) + " |" for line in lines
    )


def _safe(value: object) -> str:
    return _SPECIAL.sub(r"\\\1", printable(" ".join(str(value).split())))
