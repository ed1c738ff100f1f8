"""Writes docs/fault-benchmark.md from docs/fault-benchmark.json, the output of run.py."""

from __future__ import annotations

import json
from pathlib import Path

import jinja2

FOLDER = Path(__file__).parent
DOCS = FOLDER.parents[1] / "docs"


def main() -> None:
    record = json.loads((DOCS / "fault-benchmark.json").read_text())
    scores = {(score["tool"], score["fault"]): score for score in record["scores"]}

    def summarize(tool: str, fault: str) -> str:
        score = scores.get((tool, fault))
        if score is None:
            return "not run"
        if score["seconds"] is None:
            return "no result"
        steps = score["manual_steps"]
        manual = f", {steps} manual step{'s' if steps > 1 else ''}" if steps else ""
        return f"{'**equal**' if score['equal'] else 'differs'}, {score['extra_seconds']:+.0f} s{manual}"

    environment = jinja2.Environment(
        autoescape=False, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string((FOLDER / "page.md.j2").read_text())
    tools = list(dict.fromkeys(tool for tool, _ in scores))
    (DOCS / "fault-benchmark.md").write_text(template.render(**record, tools=tools, summarize=summarize))


if __name__ == "__main__":
    main()
