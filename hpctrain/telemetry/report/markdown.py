"""A report as Markdown: for a chat, an issue, a file in a repository."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from hpctrain.telemetry.report.advice import advise
from hpctrain.telemetry.report.compare import differences, side_by_side
from hpctrain.telemetry.report.facts import Facts
from hpctrain.telemetry.report.page import ledger_rows
from hpctrain.telemetry.report.story import figures, how_it_ended, story, what_followed, what_it_cost
from hpctrain.telemetry.report.words import clock, duration, plain

#: What Markdown or HTML would take for more than a character.
_SPECIAL = re.compile(r"([\\`*_\[\]<>#|~&$])")


def report_text(facts: Facts) -> str:
    """The report of one run."""
    parts = [
        f"# {_safe(facts.run_id)}: {_safe(facts.state)}",
        " ".join(map(_safe, story(facts))),
        *map(_safe, facts.notes),
        _table(("", "", ""), figures(facts)),
        "## Where the time went",
        _ledger(facts),
    ]
    if facts.attempts:
        rows = [
            (one.number, clock(one.started), how_it_ended(one), what_followed(one), what_it_cost(one))
            for one in facts.attempts
        ]
        parts += ["## What happened", _table(("start", "when", "ended", "then", "that cost"), rows)]
    if advice := advise(facts):
        told = [(one.what, one.evidence) for one in advice]
        parts += ["## What would help", _table(("what to do", "why"), told)]
    if facts.again:
        # Longer than any run of backticks inside.
        longest = max(map(len, re.findall(r"`*", "\n".join(facts.again))))
        fence = "`" * max(3, longest + 1)
        parts += ["## Run it again", "\n".join([fence + "bash", *map(plain, facts.again), fence])]
    return "\n\n".join(parts) + "\n"


def comparison_text(runs: Sequence[Facts]) -> str:
    """The comparison of several."""
    names = [run.run_id for run in runs]
    parts = ["# " + ", ".join(map(_safe, names)), _table(("", *names), side_by_side(runs))]
    if rows := differences(runs):
        parts += ["## What was asked for differently", _table(("", *names), rows)]
    return "\n\n".join(parts) + "\n"


def _ledger(facts: Facts) -> str:
    rows = [
        (row["name"], row["share"], row["duration"], row["meaning"])
        if row["measured"]
        else (row["name"], "–", "–", "not measured, and part of training")
        for row in ledger_rows(facts.ledger)
    ]
    return _table(("", "share", "time", ""), [*rows, ("all of it", "100 %", _wall(facts), "")])


def _wall(facts: Facts) -> str:
    return duration(facts.ledger.wall_us / 1e6)


def _table(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell if cell == "---" else _safe(cell) for cell in line) + " |" for line in lines
    )


def _safe(value: object) -> str:
    return _SPECIAL.sub(r"\\\1", plain(" ".join(str(value).split())))
