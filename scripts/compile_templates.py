"""Writes hpctrain/jobs/submit/shipped_scripts.py: the shipped templates as Python, in the place of Jinja.

    .venv/bin/python scripts/compile_templates.py

A template that does more than what is translated here is left out, and is rendered by Jinja itself.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from jinja2 import nodes

from hpctrain.jobs.submit.render import TEMPLATE_SUFFIX, jinja_environment, shipped_templates

TARGET = Path(__file__).resolve().parents[1] / "hpctrain" / "jobs" / "submit" / "shipped_scripts.py"

_HEAD = '''\
"""The shipped templates as Python. Written by scripts/compile_templates.py: change the templates instead."""

# ruff: noqa: E501, UP018, UP034
# fmt: off

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from hpctrain.jobs.submit.render import shell_quote

if TYPE_CHECKING:
    from hpctrain.spec.job_spec import JobSpec

    Script = Callable[[JobSpec, Sequence[str], str, str], Iterator[str]]
'''

_FUNCTION = (
    "def _{name}(spec: JobSpec, directives: Sequence[str], template: str, version: str) -> Iterator[str]:"
)


class NotTranslated(Exception):
    """A template has something in it that only Jinja knows."""


class Template:
    """A template with all that it extends."""

    def __init__(self, file: str) -> None:
        environment = jinja_environment(shipped_templates())
        self.files: list[str] = []
        self.blocks: dict[str, list[nodes.Block]] = {}
        """By name, the one that counts first, behind it the one that `super()` calls."""
        while file:
            self.files.append(file)
            source = environment.loader.get_source(environment, file)[0]
            self.root = environment.parse(source)
            extended = [node for node in self.root.body if isinstance(node, nodes.Extends)]
            for block in self.root.find_all(nodes.Block):
                self.blocks.setdefault(block.name, []).append(block)
            if extended and not _is_plain_child(self.root):
                raise NotTranslated(file)
            file = extended[0].template.value if extended else ""

    def function(self, name: str) -> str:
        """The text of a function that yields the parts of the script."""
        lines = [_FUNCTION.format(name=name), *_indented(self._statements(self.root.body, []))]
        return "\n".join(lines) + "\n"

    def _statements(self, body: list[nodes.Node], supers: list[nodes.Block]) -> Iterator[str]:
        """The lines that stand for some nodes, of which `supers` are the blocks that `super()` calls."""
        for node in body:
            match node:
                case nodes.Output():
                    for part in node.nodes:
                        if _is_super(part):
                            yield from self._statements(supers[0].body, supers[1:])
                        else:
                            yield from _output(part)
                case nodes.Block():
                    first, *rest = self.blocks[node.name]
                    yield from self._statements(first.body, rest)
                case nodes.For(target=nodes.Name(), else_=[], test=None):
                    yield f"for {node.target.name} in {_value(node.iter)}:"
                    yield from _indented(self._statements(node.body, supers))
                case nodes.If():
                    word = "if"
                    for branch in (node, *node.elif_):
                        yield f"{word} {_value(branch.test)}:"
                        yield from _indented(self._statements(branch.body, supers))
                        word = "elif"
                    if node.else_:
                        yield "else:"
                        yield from _indented(self._statements(node.else_, supers))
                case _:
                    raise NotTranslated(type(node).__name__)


def _is_plain_child(root: nodes.Template) -> bool:
    """Whether all that it has besides blocks is the fixed name of what it extends."""
    others = [node for node in root.body if not isinstance(node, nodes.Block | nodes.Output)]
    return len(others) == 1 and isinstance(others[0].template, nodes.Const)


def _is_super(part: nodes.Node) -> bool:
    return isinstance(part, nodes.Call) and isinstance(part.node, nodes.Name) and part.node.name == "super"


def _output(part: nodes.Node) -> Iterator[str]:
    if isinstance(part, nodes.TemplateData):
        yield from (f"yield {json.dumps(line)}" for line in part.data.splitlines(keepends=True))
    else:
        yield f"yield str({_value(part)})"


def _value(node: nodes.Node) -> str:
    match node:
        case nodes.Name():
            return str(node.name)
        case nodes.Const():
            return json.dumps(node.value)
        case nodes.Getattr():
            return f"{_value(node.node)}.{node.attr}"
        case nodes.Filter(name="quote", args=[], kwargs=[]):
            return f"shell_quote({_value(node.node)})"
        case nodes.Concat():
            return " + ".join(f"str({_value(part)})" for part in node.nodes)
        case nodes.Compare(ops=[nodes.Operand(op="eq") as other]):
            return f"{_value(node.expr)} == {_value(other.expr)}"
        case nodes.CondExpr() if node.expr2 is not None:
            return f"({_value(node.expr1)} if {_value(node.test)} else {_value(node.expr2)})"
    raise NotTranslated(type(node).__name__)


def _indented(lines: Iterator[str]) -> list[str]:
    return [f"    {line}" for line in lines] or ["    pass"]


def text() -> str:
    """What has to stand in the file."""
    functions, table = [], []
    for path in sorted(shipped_templates().glob(f"*{TEMPLATE_SUFFIX}")):
        name = path.name.removesuffix(TEMPLATE_SUFFIX)
        try:
            template = Template(path.name)
            functions.append(template.function(name))
        except NotTranslated:
            continue
        sums = ", ".join(f"{json.dumps(file)}: {checksums()[file]}" for file in template.files)
        table.append(f"    {json.dumps(name)}: (_{name}, {{{sums}}}),\n")
    explained = "#: By name: what yields the script, and CRC-32 of the files that it was made from.\n"
    scripts = "SCRIPTS: dict[str, tuple[Script, dict[str, int]]] = {\n" + "".join(table) + "}\n"
    return "\n\n".join([_HEAD, *functions, explained + scripts])


def checksums() -> Mapping[str, int]:
    """CRC-32 of each shipped template."""
    return {
        path.name: zlib.crc32(path.read_bytes()) for path in shipped_templates().glob(f"*{TEMPLATE_SUFFIX}")
    }


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
