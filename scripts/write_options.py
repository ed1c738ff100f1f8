"""Generator for the lists of options in docs/commands.md, from the commands themselves.

    .venv/bin/python scripts/write_options.py

The content between `<!-- options of COMMAND -->` and `<!-- end of options -->` is replaced. For `submit`, it
contains the options by group; for `the others`, a section for each other command with the names of its
options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import click

from hpctrain.cli.common import walk_commands
from hpctrain.cli.main import cli
from hpctrain.cli.submit import SBATCH_HEADING, describe_sbatch_options, heading

PAGE = Path(__file__).resolve().parents[1] / "docs" / "commands.md"

#: Python names of options whose meaning the page explains once.
SHARED = {"runs_dir", "as_json"}

_PLACE = re.compile(r"(<!-- options of (submit|the others) -->\n).*?(<!-- end of options -->)", re.DOTALL)


def filled_in(text: str) -> str:
    """Return the page with the current options."""
    texts = {"submit": _submit, "the others": _others}
    return _PLACE.sub(lambda match: "\n".join([match[1], *texts[match[2]](), match[3]]), text)


def _submit() -> Iterator[str]:
    (context,) = (context for name, context in walk_commands(cli) if name == "submit")
    for title, members in groupby(_options(context), heading):
        yield f"**{title}**\n"
        yield from _list(members, context)
        yield ""
        if title == SBATCH_HEADING:
            yield re.sub(r"(-[-\w]+)(?=[,.])", r"`\1`", describe_sbatch_options()) + "\n"


def _others() -> Iterator[str]:
    for name, context in walk_commands(cli):
        if name != "submit" and not isinstance(context.command, click.Group):
            arguments = " ".join(context.command.collect_usage_pieces(context)).removeprefix("[OPTIONS]")
            yield f"### `{f'{context.command_path} {arguments.strip()}'.strip()}`\n"
            yield (context.command.help or "").partition("\n\n")[0].replace("\n", " ") + "\n"
            records = (
                option.get_help_record(context) for option in _options(context) if option.name not in SHARED
            )
            if names := [f"`{record[0]}`" for record in records if record]:
                yield f"Options: {', '.join(names)}\n"


def _options(context: click.Context) -> list[click.Option]:
    return [param for param in context.command.params if isinstance(param, click.Option)]


def _list(options: Iterable[click.Option], context: click.Context) -> Iterator[str]:
    records = [record for option in options if (record := option.get_help_record(context))]
    for names, help_text in records:
        text = re.sub(r"\s+", " ", help_text).replace("<", "&lt;")
        yield f"- `{names}`: {text}"


if __name__ == "__main__":
    PAGE.write_text(filled_in(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
