"""`hpctrain man`: manual pages, generated from the commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from hpctrain._version import __version__
from hpctrain.cli.common import short_path, walk_commands


@click.command("man")
@click.argument("name", nargs=-1, metavar="[COMMAND]")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="FOLDER",
    help="Write the manual pages of all commands to FOLDER.",
)
@click.pass_context
def command(context: click.Context, name: tuple[str, ...], output: Path | None) -> None:
    """Print the manual page of COMMAND (default: hpctrain), formatted for man.

    \b
        hpctrain man submit | man -l -
        hpctrain man --output ~/.local/share/man/man1
    """  # noqa: D301
    root = context.find_root()
    assert isinstance(root.command, click.Group)
    pages = {"hpctrain": root, **{f"hpctrain {path}": its for path, its in walk_commands(root.command)}}
    if output is None:
        title = " ".join(("hpctrain", *name))
        if title not in pages:
            raise click.UsageError(f"There is no command {title!r}. `hpctrain --help` lists the commands.")
        click.echo(man_page(title, pages[title], list(pages)))
        return
    if name:
        raise click.UsageError("--output writes the manual pages of all commands. Omit COMMAND.")
    output.mkdir(parents=True, exist_ok=True)
    for title, its in pages.items():
        (output / f"{title.replace(' ', '-')}.1").write_text(man_page(title, its, list(pages)) + "\n")
    click.echo(f"Wrote {len(pages)} manual pages to {short_path(output)}.")


def man_page(title: str, context: click.Context, titles: list[str]) -> str:
    """Return the page of a command in the format of man(7).

    Args:
        title: the command, such as `hpctrain sweep status`.
        context: its context.
        titles: all commands, which the page of hpctrain lists.
    """
    command, name = context.command, title.replace(" ", "-")
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [
        f'.TH "{_escape(name.upper())}" 1 "" "hpctrain {__version__}" "hpctrain"',
        *(".SH NAME", rf"{_escape(name)} \- {_escape(command.get_short_help_str(200))}"),
        *(".SH SYNOPSIS", f".B {_escape(title)}", _escape(usage)),
        *(".SH DESCRIPTION", *_paragraphs(command.help or "")),
    ]
    params = (param for param in command.params if isinstance(param, click.Option))
    options = [record for param in params if (record := param.get_help_record(context))]
    if options:
        lines.append(".SH OPTIONS")
    for names, text in options:
        lines += [".TP", f".B {_escape(names)}", _escape(" ".join(text.split()))]
    if isinstance(command, click.Group):
        inner = [each.replace(" ", "-") for each in titles if each.startswith(f"{title} ")]
        lines += [".SH COMMANDS", *(f".br\n.BR {_escape(each)} (1)" for each in inner)]
    return "\n".join(lines)


def _paragraphs(text: str) -> Iterator[str]:
    r"""Yield the paragraphs of a help text; those that begin with `\b` keep their lines."""
    for paragraph in text.split("\n\n"):
        yield ".PP"
        if paragraph.startswith("\b"):
            yield from (".nf", *map(_escape, paragraph.splitlines()[1:]), ".fi")
        else:
            yield _escape(" ".join(paragraph.split()))


def _escape(text: str) -> str:
    """Return text without characters that are special in roff."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return f"\\&{text}" if text.startswith((".", "'", " ")) else text
