"""Reader of configuration files that keeps the line of each option."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option import Option
from hpctrain.jobs.options.option_value import (
    PROFILES_KEY,
    SITE_KEY,
    SWEEP_KEY,
    OptionSource,
    OptionValue,
    find_option,
    invalid_value_message,
)


@dataclass(frozen=True)
class ConfigFile:
    """The content of a configuration file."""

    path: Path
    plain: list[OptionValue] = field(default_factory=list)
    profiles: dict[str, list[OptionValue]] = field(default_factory=dict)
    site: list[yaml.Node] = field(default_factory=list)
    """The `site:` section: empty, or a single node."""
    sweep: dict[str, str | list[str]] = field(default_factory=dict)
    """The `sweep:` section: values of each hyper-parameter."""


def read_config_file(path: Path, environ: Mapping[str, str]) -> ConfigFile:
    """Read and check a configuration file.

    Args:
        path: the file.
        environ: defines the home folder for `~`.

    Raises:
        SpecError: it cannot be read, is not valid YAML, or has an unknown key or a value of the wrong type.
    """
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file)
        return _Reader(path, environ).file(root)
    except OSError as error:
        raise SpecError(
            f"Cannot read the configuration file {str(path)!r}: {error.strerror}. Check its path and "
            "permissions."
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(
            f"{path} is not valid UTF-8: {error.reason} at byte {error.start}. Save the file as UTF-8."
        ) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        raise SpecError(f"{path}{line} is not valid YAML: {error.problem or error.context}.") from error
    except yaml.YAMLError as error:
        raise SpecError(f"{path} is not valid YAML: {error}.") from error
    except RecursionError as error:
        raise SpecError(f"{path} is nested too deeply.") from error
    except SpecError:
        raise
    except (ValueError, OverflowError) as error:  # The library passes on errors of invalid escapes.
        raise SpecError(f"{path} is not valid YAML: {error}.") from error


class _Reader:
    """Converts YAML nodes to option values with their lines."""

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self._path, self._environ = path, environ

    def file(self, root: yaml.Node | None) -> ConfigFile:
        found = ConfigFile(self._path)
        if root is None or _is_null(root):
            return found
        for key, line, node in self._entries(root, "the file"):
            if key == SITE_KEY:
                found.site.append(node)
            elif key == SWEEP_KEY:
                found.sweep.update(self._sweep(node))
            elif key != PROFILES_KEY:
                found.plain.extend(self._option(key, node, line, None))
            elif not _is_null(node):
                for name, _, section in self._entries(node, PROFILES_KEY):
                    found.profiles[name] = list(self._section(name, section))
        return found

    def _sweep(self, node: yaml.Node) -> Iterator[tuple[str, str | list[str]]]:
        for name, line, entry in self._entries(node, SWEEP_KEY):
            source = OptionSource("", self._path, line)
            entries = entry.value if isinstance(entry, yaml.SequenceNode) else [entry]
            words = [self._text(f"{SWEEP_KEY}.{name}", each, source) or "" for each in entries]
            yield name, words if isinstance(entry, yaml.SequenceNode) else words[0]

    def _section(self, profile: str, node: yaml.Node) -> Iterator[OptionValue]:
        if not _is_null(node):
            for key, line, value in self._entries(node, f"the profile {profile!r}"):
                yield from self._option(key, value, line, profile)

    def _option(self, key: str, node: yaml.Node, line: int, profile: str | None) -> Iterator[OptionValue]:
        source = OptionSource("", self._path, line, profile)
        option = find_option(key, f"{source}: ")
        name = option.name
        if not option.kind.pairs:
            yield OptionValue(name, self._value(key, node, source, option), source)
        elif _is_null(node):
            yield OptionValue(name, None, source)
        else:
            for part, entry_line, entry in self._named(node, key, grouped=option.kind.grouped):
                where = OptionSource("", self._path, entry_line, profile)
                yield OptionValue(f"{name}.{part}", self._text(f"{key}.{part}", entry, where), where)

    def _named(self, node: yaml.Node, key: str, *, grouped: bool) -> Iterator[tuple[str, int, yaml.Node]]:
        """Yield the entries of an option with several entries; grouped entries have two-part names."""
        for name, line, entry in self._entries(node, key):
            if grouped and isinstance(entry, yaml.MappingNode):
                for part, inner_line, inner in self._entries(entry, f"{key}.{name}"):
                    yield f"{name}.{part}", inner_line, inner
            else:
                yield name, line, entry

    def _value(self, key: str, node: yaml.Node, source: OptionSource, option: Option) -> Any:
        if option.kind.many and isinstance(node, yaml.SequenceNode):
            entries = (
                self._value(f"{key}[{i}]", entry, source, option) for i, entry in enumerate(node.value)
            )
            return [word for words in entries for word in words or ()]
        if (text := self._text(key, node, source)) is None:
            return None
        try:
            value = option.kind.parse(text)
        except ValueError:
            raise SpecError(f"{source}: {invalid_value_message(key, text, option)}") from None
        if option.about.is_path is not None and option.about.is_path(text):
            return option.kind.parse(self._anchored(text))
        return value

    def _text(self, key: str, node: yaml.Node, source: OptionSource) -> str | None:
        """Return a scalar as written: 12:30:00 does not become a number, nor `on` a boolean."""
        if _is_null(node):
            return None
        if not isinstance(node, yaml.ScalarNode):
            what = "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
            raise SpecError(f"{source}: {key} is {what}, but must be a single value.")
        return str(node.value)

    def _anchored(self, text: str) -> str:
        if text.startswith("~/") and (home := self._environ.get("HOME")):
            return os.path.join(home, text[2:])
        return os.path.join(self._path.parent, text)

    def _entries(self, node: yaml.Node, what: str) -> Iterator[tuple[str, int, yaml.Node]]:
        """Yield each key of a mapping with its line and value. Duplicate keys are an error."""
        lines: dict[str, int] = {}
        line = node.start_mark.line + 1
        if not isinstance(node, yaml.MappingNode):
            raise SpecError(
                f"{self._path}:{line}: {what} must be a mapping (lines of the form `key: value`)."
            )
        for key_node, value in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value
            if not isinstance(key, str):
                raise SpecError(
                    f"{self._path}:{line}: a key is a list or a mapping, but must be a single value."
                )
            if key in lines:
                raise SpecError(
                    f"{self._path}:{line}: duplicate key {key!r}, already set on line {lines[key]}. "
                    "Remove one of the two."
                )
            lines[key] = line
            yield key, line, value


def _is_null(node: yaml.Node) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")
