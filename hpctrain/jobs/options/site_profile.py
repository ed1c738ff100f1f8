"""Read and write the profile of a site: the `site:` section of a configuration file.

`hpctrain doctor --write` writes it. Each submission queries Slurm again; the profile contains settings that
Slurm does not report, or not to every user.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from hpctrain.errors import SpecError
from hpctrain.jobs.options.config_files import ConfigNode
from hpctrain.jobs.options.option import NO, YES
from hpctrain.jobs.options.option_parser import SITE_KEY
from hpctrain.slurm.site_facts import Site
from hpctrain.text import join_or, suggest

_T = TypeVar("_T")
_TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


def read_profile(site: Site, node: ConfigNode) -> Site:
    """Return `site` updated with the `site:` section of a file.

    Raises:
        SpecError: a key is unknown, or a value has the wrong type; the message contains the line.
    """
    return _update(site, node, SITE_KEY)


def write_profile(site: Site) -> dict[str, Any]:
    """Return the `site:` section for this site as plain values, without defaults."""
    plain: dict[str, Any] = _plain(site)
    return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        entries = ((entry, getattr(value, entry.name)) for entry in fields(value))
        return {entry.name: _plain(content) for entry, content in entries if content != _default(entry)}
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    return dict(value) if isinstance(value, Mapping) else value


def _default(entry: Field[Any]) -> Any:
    return entry.default if entry.default_factory is MISSING else entry.default_factory()


def _update(base: _T, node: ConfigNode, key: str) -> _T:
    """Return the dataclass `base` updated with the fields of the node."""
    changes = {}
    for name, (hint, value) in _fields(type(base), node, key).items():
        current, label = getattr(base, name), f"{key}.{name}"
        is_section = is_dataclass(current) and value.value is not None
        changes[name] = _update(current, value, label) if is_section else _parse(hint, value, label)
    updated: _T = replace(base, **changes)  # type: ignore[type-var]
    return updated


def _fields(kind: Any, node: ConfigNode, key: str) -> dict[str, tuple[Any, ConfigNode]]:
    """Return the type hint and the node of each entry."""
    hints, entries = get_type_hints(kind), node.entries(key)
    for name, value in entries.items():
        if name not in hints:
            raise SpecError(f"{value.place}: unknown key {name!r} in {key}. {suggest(name, list(hints))}")
    return {name: (hints[name], value) for name, value in entries.items()}


def _parse(hint: Any, node: ConfigNode, key: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        if node.value is None:
            return None
        return _parse(next(kind for kind in arguments if kind is not type(None)), node, key)
    if origin is tuple:
        if not isinstance(node.value, list):
            raise _invalid_value(node, key, "a list")
        return tuple(_parse(arguments[0], entry, f"{key}[{i}]") for i, entry in enumerate(node.value))
    if origin is Mapping:
        return {name: _parse(arguments[1], entry, key) for name, entry in node.entries(key).items()}
    if is_dataclass(hint):
        given = _fields(hint, node, key)
        for entry in fields(hint):
            if entry.name not in given and entry.default is entry.default_factory is MISSING:
                raise SpecError(f"{node.place}: the key {entry.name!r} is missing in {key}. Add it.")
        build = cast(Callable[..., Any], hint)
        return build(**{name: _parse(kind, value, f"{key}.{name}") for name, (kind, value) in given.items()})
    return _parse_scalar(hint, node, key)


def _parse_scalar(hint: Any, node: ConfigNode, key: str) -> Any:
    text = node.value
    if isinstance(text, str):
        if get_origin(hint) is Literal:
            if text in get_args(hint):
                return text
        elif hint is bool:
            if text.lower() in (*YES, *NO):
                return text.lower() in YES
        else:
            try:
                return hint(text)
            except ValueError:
                pass
    choices = join_or(get_args(hint)) if get_origin(hint) is Literal else _TYPE_NAMES[hint]
    raise _invalid_value(node, key, choices)


def _invalid_value(node: ConfigNode, key: str, expected: str) -> SpecError:
    kind = "a list" if isinstance(node.value, list) else "a mapping"
    if node.value is None or isinstance(node.value, str):
        kind = repr(node.value or "")
    return SpecError(f"{node.place}: {key} is {kind}, but must be {expected}.")
