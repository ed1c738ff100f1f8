"""Commands of hpctrain in its own messages."""

import re

import click
from helpers import REPOSITORY

from hpctrain.cli.main import cli

SUGGESTED = re.compile(r"`(?:hpctrain|\{program_name\(\)\}) ([^`\n\"]+)`")
#: Two string literals that Python joins.
JOINT = re.compile(r'"\s*\n\s*f?"')


def unknown_words(command_line: str) -> list[str]:
    """Return the commands and options in a command line of hpctrain that do not exist."""
    context = click.Context(cli)
    command: click.Command = cli
    words = command_line.split()
    while words and isinstance(command, click.Group) and re.fullmatch("[a-z-]+", words[0]):
        name = words.pop(0)
        if name.startswith("--"):
            # Of the group; `--on` is removed before click reads the words.
            words = words[1:] if name == "--on" else words
            continue
        found = command.get_command(context, name)
        if found is None:
            return [name]
        command = found
    known = {"--help", *(name for param in command.params for name in (*param.opts, *param.secondary_opts))}
    before_program = words[: words.index("--")] if "--" in words else words
    return [word for word in before_program if word.startswith("--") and word.partition("=")[0] not in known]


def test_commands_in_messages_exist():
    unknown = {}
    for path in sorted((REPOSITORY / "hpctrain").rglob("*.py")):
        for match in SUGGESTED.finditer(JOINT.sub("", path.read_text())):
            if words := unknown_words(match[1]):
                unknown[f"{path.name}: {match[0]}"] = words
    assert unknown == {}


def test_unknown_words_are_found():
    assert unknown_words("submit --explain SCRIPT") == ["--explain"]
    assert unknown_words("debug RUN") == ["debug"]
    assert unknown_words("--on CLUSTER setup --python PATH") == []
