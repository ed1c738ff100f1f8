"""Define options, their value types and sources. Values from shell, files and Python parse the same."""

from __future__ import annotations

import operator
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from msgspec import Struct
from msgspec.structs import astuple

from hpctrain.text import join_or

_NUMBER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
#: YAML's words for booleans.
YES, NO = ("true", "yes", "on"), ("false", "no", "off")


class OptionType(Struct, frozen=True):
    """The value type of an option; a union type sets several fields."""

    choices: tuple[str, ...] = ()
    flag: bool = False
    number: bool = False
    text: bool = False
    path: bool = False
    pairs: bool = False
    """Strings by name."""
    grouped: bool = False
    """Names may have two parts, as in `oom.retries`; a nested mapping may contain all names of one group."""
    many: bool = False

    @classmethod
    def from_hint(cls, hint: Any) -> OptionType:
        origin, arguments = get_origin(hint), get_args(hint)
        if origin in (types.UnionType, Union):
            return reduce(_union, map(cls.from_hint, arguments))
        if origin is Literal:
            return cls(choices=arguments)
        if origin is Mapping:
            return cls(pairs=True, grouped=get_origin(arguments[1]) is Mapping)
        if origin is Sequence:
            return cls(choices=get_args(arguments[0]), many=True)
        if origin is os.PathLike:
            return cls(path=True)
        return {bool: cls(flag=True), int: cls(number=True), str: cls(text=True)}[hint]

    def parse(self, value: object) -> Any:
        """Convert a value, or raise ValueError. Strings are parsed; numbers are accepted for strings."""
        if self.many:
            entries = [_text(entry) for entry in (value if isinstance(value, list | tuple) else [value])]
            is_known = not self.choices or {*",".join(entries).split(",")} <= {*self.choices, ""}
            if "" in entries or not is_known:
                raise ValueError(value)
            return entries
        if isinstance(value, str):
            return self._parse_text(value)
        if isinstance(value, bool):
            if self.flag:
                return value
        elif isinstance(value, Mapping):
            if self.pairs:
                return {_text(name): _text(entry) for name, entry in self._entries(value)}
        elif isinstance(value, os.PathLike):
            if self.path and isinstance(path := os.fspath(value), str):
                return path
        elif self.number or self.text:
            try:
                number = operator.index(value)  # type: ignore[arg-type]  # numpy's numbers, too
            except TypeError:
                raise ValueError(value) from None
            return number if self.number else str(number)
        raise ValueError(value)

    def _entries(self, value: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
        for name, entry in value.items():
            if self.grouped and isinstance(entry, Mapping):
                yield from ((f"{name}.{field}", field_value) for field, field_value in entry.items())
            else:
                yield name, entry

    def _parse_text(self, text: str) -> str | int | bool:
        if text in self.choices:
            return text
        if self.flag and text.lower() in (*YES, *NO):
            return text.lower() in YES
        if self.number and _NUMBER.fullmatch(text):
            return int(text)
        if self.text and text:
            return text
        raise ValueError(text)

    def __str__(self) -> str:
        """Describe the accepted values, as in "must be …"."""
        names = [
            *(["true", "false"] if self.flag else []),
            *(["an integer"] if self.number else []),
            *self.choices,
            *(["a string"] if self.text else []),
            *(["a mapping of names to strings"] if self.pairs else []),
            *(["a string, or a list of strings"] if self.many and not self.choices else []),
        ]
        return join_or(names)


def _union(type_a: OptionType, type_b: OptionType) -> OptionType:
    (choices_a, *fields_a), (choices_b, *fields_b) = astuple(type_a), astuple(type_b)
    return OptionType(choices_a + choices_b, *(a or b for a, b in zip(fields_a, fields_b, strict=True)))


def _text(value: object) -> str:
    if isinstance(value, str | int | float | os.PathLike) and not isinstance(value, bool):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    raise ValueError(value)


class Option(Struct, frozen=True):
    help: str
    """Effect of the option, in one or two sentences without Markdown."""
    metavar: str = ""
    """Placeholder of the value: by default the choices, or the name; empty for a flag."""
    default: Any = None
    default_text: str = ""
    """Description of the default, which may depend on other values; empty if there is no default."""
    example: str = ""
    in_files: bool = True
    """True if the option may be given in a file or with `--set`."""
    on_command_line: bool = True
    is_path: Callable[[str], bool] | None = None
    """Predicate for values that are paths."""
    name: str = ""
    """Name in Python and in files."""
    group: str = ""
    """Heading under which the option is listed."""
    kind: OptionType = OptionType()
    short: str = ""
    """Short name on the command line, with its dash."""

    @property
    def flag(self) -> str:
        """Name on the command line; for other options, the name in files."""
        return f"--{self.name.replace('_', '-')}" if self.on_command_line else self.name


class OptionSource(NamedTuple):
    words: str
    """Name of a source that is not a file."""
    path: Path | None = None
    line: int = 0
    profile: str | None = None
    """Section of the file."""

    @property
    def is_variable(self) -> bool:
        """True for an environment variable of sbatch, which has no effect without Slurm."""
        return self.words.startswith("SBATCH_")

    def __str__(self) -> str:
        if self.path is None:
            return self.words
        return f"{self.path}:{self.line}" + (f" (profile {self.profile})" if self.profile else "")


DEFAULT_SOURCE = OptionSource("default")


class OptionValue(NamedTuple):
    """A value of an option, or of one entry of it, as in `env.NAME`."""

    key: str
    value: Any
    """None removes values from weaker sources."""
    source: OptionSource
