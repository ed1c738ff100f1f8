"""Writes the tables of options in docs/commands.md, from the commands themselves.

    .venv/bin/python scripts/write_options.py

A table stands between `<!-- options of COMMAND -->` and `<!-- end of options -->`; what is there is replaced.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click

from hpctrain.cli.main import cli
from hpctrain.cli.submit import heading

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"

_TABLE = re.compile(r"(<!-- options of ([a-z ]+) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def filled_in(text: str) -> str:
    """The page with all its tables as they have to be."""
    return _TABLE.sub(lambda match: f"{match[1]}\n{tables(match[2].split())}\n{match[3]}", text)


def tables(words: list[str]) -> str:
    """The options of a command, a table for each of their groups."""
    command: click.Command = cli
    for word in words:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None, f"there is no command {word!r}"
        command = found
    options = [param for param in command.params if isinstance(param, click.Option)]
    groups = groupby(options, heading if words == ["submit"] else lambda _: "")
    return "\n".join(line for title, members in groups for line in _table(title, list(members)))


def _table(title: str, options: list[click.Option]) -> Iterator[str]:
    if title:
        yield f"**{title}**\n"
    yield "| option | meaning |"
    yield "|---|---|"
    context = click.Context(cli)
    for option in options:
        record = option.get_help_record(context)
        assert record is not None, option.name
        names, text = (_escaped(words) for words in record)
        yield f"| `{names}` | {text} |"
    yield ""


def _escaped(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(filled_in(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
