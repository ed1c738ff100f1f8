"""Checks of a custom template: its blocks take effect, and hpctrain still controls the run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option_parser import find_replacement
from hpctrain.spec.directives import SHORT_NAMES
from hpctrain.text import suggest

if TYPE_CHECKING:
    import jinja2

_DIRECTIVE = re.compile(r"^#SBATCH[ \t]+(\S.*)$", re.MULTILINE)


def check_blocks(environment: jinja2.Environment, file_name: str) -> None:
    """Check that each block of a template replaces a block of the template it extends."""
    from jinja2 import nodes

    loader = environment.loader
    assert loader is not None
    source, path, _ = loader.get_source(environment, file_name)
    tree = environment.parse(source, file_name, path)
    parent = tree.find(nodes.Extends)
    if parent is None or not isinstance(parent.template, nodes.Const):
        return
    known = set(_blocks_of(environment, parent.template.value))
    for node in tree.body:
        if isinstance(node, nodes.Block) and node.name not in known:
            raise SpecError(
                f"Line {node.lineno} of the template {path or file_name!r} (--template): "
                f"{parent.template.value} has no block {node.name!r}. {suggest(node.name, sorted(known))}"
            )


def check_rendered_script(text: str, lines: Sequence[str], template: str, *, supervised: bool = True) -> None:
    """Check that a script starts the supervisor, and that its directives match the request."""
    if supervised and "hpctrain.supervisor" not in text:
        raise SpecError(
            f"The template {template!r} (--template) does not start the supervisor, so no rank would "
            "run. Extend a built-in template. If you replace its block 'launch', call super() in that block."
        )
    given = dict(option for line in lines for option in directive_options(line))
    for line in text.splitlines():
        if line in lines:
            continue
        for name, value in directive_options(line):
            if name in given and given[name] != value:
                raise SpecError(
                    f"The template {template!r} (--template) contains {line.strip()!r}, but the job is "
                    f"submitted with --{name}={given[name]}. Remove that line, and pass the option "
                    "to hpctrain submit."
                )
            if name not in given and (hint := find_replacement(name)):
                raise SpecError(
                    f"The template {template!r} (--template) contains {line.strip()!r}, but a template "
                    f"cannot set --{name}. {hint}."
                )


def _blocks_of(environment: jinja2.Environment, file_name: str) -> Iterator[str]:
    """Yield the block names of a template and of the templates it extends."""
    from jinja2 import nodes

    loader = environment.loader
    assert loader is not None
    tree = environment.parse(loader.get_source(environment, file_name)[0])
    yield from (block.name for block in tree.find_all(nodes.Block))
    for parent in tree.find_all(nodes.Extends):
        for name in parent.template.find_all(nodes.Const) or ():
            yield from _blocks_of(environment, name.value)
        if isinstance(parent.template, nodes.Const):
            yield from _blocks_of(environment, parent.template.value)


def directive_options(line: str) -> Iterator[tuple[str, str]]:
    """Yield long names and values of the options in a directive line; nothing for other lines."""
    if (match := _DIRECTIVE.match(line)) is None:
        return
    try:
        words = shlex.split(match[1], comments=True)
    except ValueError:
        return
    while words:
        word = words.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
        elif word.startswith("-") and word[1:2] in SHORT_NAMES:
            name, equals, value = SHORT_NAMES[word[1]], word[2:], word[2:].removeprefix("=")
        else:
            continue
        if not equals and words and not words[0].startswith("-"):
            value = words.pop(0)
        yield name, value
