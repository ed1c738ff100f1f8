"""The profile of a site: the `site:` section of a configuration file, written by `hpctrain doctor --write`.

Each submission queries Slurm again. The profile contains settings that Slurm does not report, or not to every
user.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml
from yaml.nodes import Node

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option_value import SITE_KEY
from hpctrain.slurm.site_facts import Site
from hpctrain.text import join_or, suggest

_T = TypeVar("_T")


def read_profile(site: Site, path: Path, node: Node) -> Site:
    """Return `site` updated with the `site:` section of the file at `path`.

    Raises:
        SpecError: a key is unknown, or a value has the wrong type; the message contains the line.
    """
    reader = _Reader(path)
    return site if reader.is_null(node) else reader.update(site, node, SITE_KEY)


def write_profile(site: Site) -> dict[str, Any]:
    """Return the `site:` section for this site as plain values, without defaults."""
    plain: dict[str, Any] = _plain(site)
    return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        entries = ((entry, getattr(value, entry.name)) for entry in fields(value))
        return {entry.name: _plain(its) for entry, its in entries if its != _default(entry)}
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return dict(value) if isinstance(value, Mapping) else value


def _default(entry: Field[Any]) -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


class _Reader:
    """Converts YAML nodes to the dataclasses of `site_facts`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def update(self, base: _T, node: Node, key: str) -> _T:
        """Return the dataclass `base` updated with the fields of the node."""
        entries = self._entries(node, key)
        hints = get_type_hints(type(base))
        given = {}
        for name, value in entries.items():
            if name not in hints:
                raise self._unknown(node, key, name, list(hints))
            current = getattr(base, name)
            if is_dataclass(current) and not self.is_null(value):
                given[name] = self.update(current, value, f"{key}.{name}")
            else:
                given[name] = self._value(hints[name], value, f"{key}.{name}")
        changed: _T = replace(base, **given)  # type: ignore[type-var]
        return changed

    def is_null(self, node: Node) -> bool:
        return bool(node.tag == "tag:yaml.org,2002:null")

    def _value(self, hint: Any, node: Node, key: str) -> Any:
        origin, parts = get_origin(hint), get_args(hint)
        if origin in (types.UnionType, Union):
            if self.is_null(node):
                return None
            return self._value(next(part for part in parts if part is not type(None)), node, key)
        if origin is tuple:
            if not isinstance(node, yaml.SequenceNode):
                raise self._invalid_value(node, key, "a list")
            return tuple(self._value(parts[0], one, f"{key}[{i}]") for i, one in enumerate(node.value))
        if origin is Mapping:
            return {name: self._value(parts[1], one, key) for name, one in self._entries(node, key).items()}
        if is_dataclass(hint):
            return self._build(hint, node, key)
        return self._scalar(hint, node, key)

    def _build(self, kind: Any, node: Node, key: str) -> Any:
        hints = get_type_hints(kind)
        entries = self._entries(node, key)
        for name in entries:
            if name not in hints:
                raise self._unknown(node, key, name, list(hints))
        for entry in fields(kind):
            if entry.name not in entries and entry.default is entry.default_factory is MISSING:
                raise SpecError(f"{self._place(node)}: the key {entry.name!r} is missing in {key}. Add it.")
        return kind(**{name: self._value(hints[name], one, f"{key}.{name}") for name, one in entries.items()})

    def _scalar(self, hint: Any, node: Node, key: str) -> Any:
        """Parse a scalar as written: a version such as 23.02 is not a number."""
        if isinstance(node, yaml.ScalarNode) and not self.is_null(node):
            text = str(node.value)
            if get_origin(hint) is Literal:
                if text in get_args(hint):
                    return text
            elif hint is bool:
                if text.lower() in ("true", "yes", "on", "false", "no", "off"):
                    return text.lower() in ("true", "yes", "on")
            else:
                try:
                    return hint(text)
                except ValueError:
                    pass
        choices = join_or(get_args(hint)) if get_origin(hint) is Literal else _NAMES[hint]
        raise self._invalid_value(node, key, choices)

    def _entries(self, node: Node, key: str) -> dict[str, Node]:
        if not isinstance(node, yaml.MappingNode):
            raise self._invalid_value(node, key, "a mapping (lines of the form `key: value`)")
        return {str(name.value): value for name, value in node.value}

    def _invalid_value(self, node: Node, key: str, takes: str) -> SpecError:
        what = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
        if isinstance(node, yaml.ScalarNode):
            what = repr(node.value)
        return SpecError(f"{self._place(node)}: {key} is {what}, but must be {takes}.")

    def _unknown(self, node: Node, key: str, name: str, known: list[str]) -> SpecError:
        place = next((one for one, _ in node.value if one.value == name), node)
        return SpecError(f"{self._place(place)}: unknown key {name!r} in {key}. {suggest(name, known)}")

    def _place(self, node: Node) -> str:
        return f"{self._path}:{node.start_mark.line + 1}"


_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}
