"""Read configuration files, keeping the line of each value for errors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import yaml

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option import OptionSource, OptionValue
from hpctrain.jobs.options.option_parser import (
    PROFILES_KEY,
    SITE_KEY,
    SWEEP_KEY,
    find_option,
    parse_option,
)


class ConfigNode(NamedTuple):
    """A value in a configuration file."""

    value: str | list[ConfigNode] | dict[str, ConfigNode] | None
    """Scalars are strings as written: 12:30:00 is not a number, nor is `on` a boolean."""
    place: str
    """The file and the line."""
    line: int

    def entries(self, label: str) -> dict[str, ConfigNode]:
        """Return the entries of a mapping; none for an empty value.

        Raises:
            SpecError: the value is not a mapping.
        """
        if self.value is None:
            return {}
        if not isinstance(self.value, dict):
            raise SpecError(f"{self.place}: {label} must be a mapping (lines of the form `key: value`).")
        return self.value

    def text(self, label: str) -> str | None:
        """Return a scalar.

        Raises:
            SpecError: the value is a list or a mapping.
        """
        if isinstance(self.value, list | dict):
            kind = "a list" if isinstance(self.value, list) else "a mapping"
            raise SpecError(f"{self.place}: {label} is {kind}, but must be a single value.")
        return self.value


@dataclass(frozen=True)
class ConfigFile:
    """The content of a configuration file."""

    path: Path
    plain: list[OptionValue] = field(default_factory=list)
    profiles: dict[str, list[OptionValue]] = field(default_factory=dict)
    site: list[ConfigNode] = field(default_factory=list)
    """The `site:` section: empty, or a single value."""
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
    content = ConfigFile(path)
    for key, node in _read_yaml(path).entries("the file").items():
        if key == SITE_KEY:
            content.site.append(node)
        elif key == SWEEP_KEY:
            for name, values in node.entries(key).items():
                label = f"{key}.{name}"
                nodes = values.value if isinstance(values.value, list) else [values]
                texts = [entry.text(label) or "" for entry in nodes]
                content.sweep[name] = texts if nodes is values.value else texts[0]
        elif key == PROFILES_KEY:
            for profile, section in node.entries(key).items():
                options = section.entries(f"the profile {profile!r}").items()
                content.profiles[profile] = [
                    value
                    for name, entry in options
                    for value in _read_option(name, entry, content, environ, profile)
                ]
        else:
            content.plain.extend(_read_option(key, node, content, environ, None))
    return content


def _read_option(
    key: str, node: ConfigNode, file: ConfigFile, environ: Mapping[str, str], profile: str | None
) -> Iterator[OptionValue]:
    """Yield the value of an option, or those of its entries; paths are relative to the file's folder."""
    source = OptionSource("", file.path, node.line, profile)
    option = find_option(key, f"{source}: ")
    if node.value is None:
        yield from parse_option(key, None, "", source)
    elif option is not None and option.kind.pairs:
        for name, entry in _named_entries(node, key, grouped=option.kind.grouped):
            place = source._replace(line=entry.line)
            value = entry.text(f"{key}.{name}")
            yield from parse_option(f"{key}.{name}", value, f"{place}: {key}.{name}", place)
    else:
        is_list = (option is None or option.kind.many) and isinstance(node.value, list)
        nodes = node.value if is_list and isinstance(node.value, list) else [node]
        texts = [text for entry in nodes if (text := entry.text(key)) is not None]
        if option is not None and option.about.is_path is not None:
            texts = [
                _anchor(text, file.path, environ) if option.about.is_path(text) else text for text in texts
            ]
        yield from parse_option(key, texts if is_list else texts[0], f"{source}: {key}", source)


def _named_entries(node: ConfigNode, key: str, *, grouped: bool) -> Iterator[tuple[str, ConfigNode]]:
    for name, entry in node.entries(key).items():
        if grouped and isinstance(entry.value, dict):
            yield from ((f"{name}.{inner}", value) for inner, value in entry.value.items())
        else:
            yield name, entry


def _anchor(text: str, path: Path, environ: Mapping[str, str]) -> str:
    if text.startswith("~/") and (home := environ.get("HOME")):
        return os.path.join(home, text[2:])
    return os.path.join(path.parent, text) if text else text


def _read_yaml(path: Path) -> ConfigNode:
    try:
        with open(path, encoding="utf-8") as file:
            root = yaml.compose(file)
        return ConfigNode(None, f"{path}:1", 1) if root is None else _convert(root, path, {})
    except SpecError:  # is a ValueError
        raise
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
    except RecursionError as error:
        raise SpecError(f"{path} is nested too deeply.") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the library passes on errors of escapes
        raise SpecError(f"{path} is not valid YAML: {error}.") from error


def _convert(node: yaml.Node, path: Path, converted: dict[yaml.Node, ConfigNode]) -> ConfigNode:
    """Convert a node once, even if many aliases refer to it."""
    if node not in converted:
        converted[node] = _convert_new(node, path, converted)
    return converted[node]


def _convert_new(node: yaml.Node, path: Path, converted: dict[yaml.Node, ConfigNode]) -> ConfigNode:
    line = node.start_mark.line + 1
    place = f"{path}:{line}"
    if isinstance(node, yaml.SequenceNode):
        return ConfigNode([_convert(entry, path, converted) for entry in node.value], place, line)
    if not isinstance(node, yaml.MappingNode):
        is_null = node.tag == "tag:yaml.org,2002:null"
        return ConfigNode(None if is_null else str(node.value), place, line)
    entries: dict[str, ConfigNode] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key.value, str):
            raise SpecError(f"{path}:{line}: a key is a list or a mapping, but must be a single value.")
        if key.value in entries:
            raise SpecError(
                f"{path}:{line}: duplicate key {key.value!r}, already set on line "
                f"{entries[key.value].line}. Remove one of the two."
            )
        # The line of an option is that of its key.
        entry = _convert(value, path, converted)
        entries[key.value] = entry._replace(place=f"{path}:{line}", line=line)
    return ConfigNode(entries, place, node.start_mark.line + 1)
