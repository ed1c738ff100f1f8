"""Read configuration files, keeping the line of each value for errors, and write a template of one."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from msgspec import Struct

from hpctrain.errors import SpecError
from hpctrain.jobs.options.option import Option, OptionSource, OptionType, OptionValue
from hpctrain.jobs.options.option_parser import PROFILES_KEY, SITE_KEY, SWEEP_KEY, find_option, parse_option
from hpctrain.jobs.options.option_table import all_options
from hpctrain.text import suggest

#: Rules in the `site:` section that Slurm does not report: the fields of `SiteConventions`.
_HABITS = {
    "memory_option": OptionType(choices=("accepted", "ignored", "refused")),
    **dict.fromkeys(("needs_time", "needs_memory", "requeue"), OptionType(flag=True)),
    "containers": OptionType(many=True),
}


class ConfigNode(NamedTuple):
    value: str | list[ConfigNode] | dict[str, ConfigNode] | None
    """Scalars are strings as written: 12:30:00 is not a number, nor is `on` a boolean."""
    path: Path
    line: int

    def error(self, message: str) -> SpecError:
        return SpecError(f"{self.path}:{self.line}: {message}")

    def entries(self, label: str) -> dict[str, ConfigNode]:
        """Return the entries of a mapping; none for an empty value."""
        if self.value is None:
            return {}
        if not isinstance(self.value, dict):
            raise self.error(f"{label} must be a mapping (lines of the form `key: value`).")
        return self.value

    def text(self, label: str) -> str | None:
        if isinstance(self.value, list | dict):
            kind = "a list" if isinstance(self.value, list) else "a mapping"
            raise self.error(f"{label} is {kind}, but must be a single value.")
        return self.value

    def texts(self, label: str) -> list[str | None]:
        return [node.text(label) for node in (self.value if isinstance(self.value, list) else [self])]


class ConfigFile(Struct, frozen=True):
    path: Path
    plain: list[OptionValue] = []
    profiles: dict[str, list[OptionValue]] = {}
    habits: dict[str, Any] = {}
    """The rules of the site: fields of `SiteConventions`."""
    sweep: dict[str, str | list[str]] = {}
    """The `sweep:` section: values of each hyper-parameter."""


def read_config_file(path: Path, environ: Mapping[str, str]) -> ConfigFile:
    """Read and check a configuration file; `environ` defines the home folder for `~`."""
    content = ConfigFile(path)
    for key, node in _read_yaml(path).entries("the file").items():
        if key == SITE_KEY:
            content.habits.update(_read_habits(node))
        elif key == SWEEP_KEY:
            for name, values in node.entries(key).items():
                texts = [text or "" for text in values.texts(f"{key}.{name}")]
                content.sweep[name] = texts if isinstance(values.value, list) else texts[0]
        elif key == PROFILES_KEY:
            for profile, section in node.entries(key).items():
                options = section.entries(f"the profile {profile!r}").items()
                content.profiles[profile] = [
                    value for name, entry in options for value in _read_option(name, entry, environ, profile)
                ]
        else:
            content.plain.extend(_read_option(key, node, environ, None))
    return content


def _read_habits(site: ConfigNode) -> Iterator[tuple[str, Any]]:
    for key, section in site.entries(SITE_KEY).items():
        if key != "habits":
            raise section.error(f"unknown key {key!r} in {SITE_KEY}. {suggest(key, ['habits'])}")
        for name, node in section.entries(f"{SITE_KEY}.{key}").items():
            label = f"{SITE_KEY}.{key}.{name}"
            if name not in _HABITS:
                raise node.error(f"unknown key {name!r} in {SITE_KEY}.{key}. {suggest(name, list(_HABITS))}")
            kind = _HABITS[name]
            value = node.texts(label) if kind.many else node.text(label)
            try:
                parsed = kind.parse("" if value is None else value)
            except ValueError:
                raise node.error(f"{label} is {value!r}, but must be {kind}.") from None
            yield name, tuple(parsed) if kind.many else parsed


def _read_option(
    key: str, node: ConfigNode, environ: Mapping[str, str], profile: str | None
) -> Iterator[OptionValue]:
    """Yield the value of an option, or those of its entries; paths are relative to the file's folder."""
    source = OptionSource("", node.path, node.line, profile)
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
        texts = [text for text in (node.texts(key) if is_list else [node.text(key)]) if text is not None]
        if option is not None and (is_path := option.is_path) is not None:
            texts = [_anchor(text, node.path, environ) if is_path(text) else text for text in texts]
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
        return ConfigNode(None, path, 1) if root is None else _convert(root, path, {})
    except SpecError:  # is a ValueError
        raise
    except OSError as error:
        message = (
            f"Cannot read the configuration file {str(path)!r}: {error.strerror}. Check its path and "
            "permissions."
        )
    except UnicodeDecodeError as error:
        message = f"{path} is not valid UTF-8: {error.reason} at byte {error.start}. Save the file as UTF-8."
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f":{mark.line + 1}" if mark else ""
        message = f"{path}{line} is not valid YAML: {error.problem or error.context}."
    except RecursionError:
        message = f"{path} is nested too deeply."
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the library passes on errors of escapes
        message = f"{path} is not valid YAML: {error}."
    raise SpecError(message)


def _convert(node: yaml.Node, path: Path, converted: dict[yaml.Node, ConfigNode]) -> ConfigNode:
    """Convert a node once, even if many aliases refer to it."""
    if node in converted:
        return converted[node]
    value: str | list[ConfigNode] | dict[str, ConfigNode] | None
    if isinstance(node, yaml.SequenceNode):
        value = [_convert(entry, path, converted) for entry in node.value]
    elif isinstance(node, yaml.MappingNode):
        value = {}
        for key, child in node.value:
            # The line of an option is that of its key.
            entry = _convert(child, path, converted)._replace(line=key.start_mark.line + 1)
            if not isinstance(key.value, str):
                raise entry.error("a key is a list or a mapping, but must be a single value.")
            if key.value in value:
                raise entry.error(
                    f"duplicate key {key.value!r}, already set on line {value[key.value].line}. Remove one "
                    "of the two."
                )
            value[key.value] = entry
    else:
        value = None if node.tag == "tag:yaml.org,2002:null" else str(node.value)
    converted[node] = ConfigNode(value, path, node.start_mark.line + 1)
    return converted[node]


_WIDTH = 100

_HEAD = """\
# Default options of `hpctrain submit` in this project. The command line overrides them.
# `hpctrain submit --show-config SCRIPT` shows each value and its source.
#
# To set an option, remove the # before its line. A key without a value removes a value that is set in
# /etc/hpctrain/*.yaml (for all users) or ~/.config/hpctrain/config.yaml. These files have the same format.
"""

_SBATCH = """
# Every other option of sbatch, with underscores. For example:
#partition: gpu
#account: physics
#qos: long
#constraint: ib&ssd
#mem: 64G
#exclusive: true
#mail_type: END,FAIL
"""

_PROFILES = """
# ---- Profiles

# Named sets of options. --profile NAME selects one.
#profiles:
#  debug:
#    nodes: 1
#    time: 10
"""


def config_template() -> str:
    """Return the text of the template. It is valid unchanged and with any line uncommented."""
    in_files = [option for option in all_options().values() if option.in_files]
    sections = [_HEAD]
    for group, members in groupby(in_files, lambda option: option.group):
        sections.append(f"\n# ---- {group}\n")
        sections.extend(map(_entry, members))
    return "".join([*sections, _SBATCH, _PROFILES])


def _entry(option: Option) -> str:
    help_lines = textwrap.wrap(option.help, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    empty = "{}" if option.kind.pairs else "[]" if option.kind.many else ""
    value = empty if option.default is None else str(option.default)
    example = f"{{{option.example}}}" if option.kind.pairs else option.example
    comments = [
        f"default: {option.default_text}" if option.default is None and option.default_text else "",
        f"example: {example}" if example else "",
        str(option.kind) if option.kind.choices else "",
    ]
    comment = "; ".join(filter(None, comments))
    line = f"#{option.name}:" + (f" {value}" if value else "") + (f"  # {comment}" if comment else "")
    return "\n".join(["", *help_lines, line, ""])
