"""What an option of a submission is, and what values it takes: one reading for shell, files and Python."""

from __future__ import annotations

import operator
import os
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

_NUMBER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
#: YAML's words for a truth value.
_YES, _NO = ("true", "yes", "on"), ("false", "no", "off")


class Kind(NamedTuple):
    """What an option takes; several things at once where its type is a union."""

    words: tuple[str, ...] = ()
    """Fixed words."""
    flag: bool = False
    number: bool = False
    text: bool = False
    path: bool = False
    pairs: bool = False
    """Texts by name."""
    grouped: bool = False
    """Such names may have two parts, as in `oom.retries`: a mapping may stand for all of one first part."""
    many: bool = False
    """Several texts, in order."""

    @classmethod
    def of(cls, hint: Any) -> Kind:
        """The kind of values that a type hint stands for."""
        origin, parts = get_origin(hint), get_args(hint)
        if origin in (types.UnionType, Union):
            return reduce(_either, map(cls.of, parts))
        if origin is Literal:
            return cls(words=parts)
        if origin is Mapping:
            return cls(pairs=True, grouped=get_origin(parts[1]) is Mapping)
        if origin is Sequence:
            return cls(many=True)
        if origin is os.PathLike:
            return cls(path=True)
        return {bool: cls(flag=True), int: cls(number=True), str: cls(text=True)}[hint]

    def take(self, value: object) -> Any:
        """`value` as the option has it: a text is read, a number may stand for its text.

        Where the option takes several, a single one may stand for a list of one.

        Raises:
            ValueError: it is nothing that the option takes.
        """
        if self.many:
            return [_word(entry) for entry in (value if isinstance(value, list | tuple) else [value])]
        if isinstance(value, str):
            return self._read(value)
        if isinstance(value, bool):
            if self.flag:
                return value
        elif isinstance(value, Mapping):
            if self.pairs:
                return {_text(name): _text(entry) for name, entry in self.entries(value)}
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

    def entries(self, value: Mapping[Any, Any]) -> Iterator[tuple[Any, Any]]:
        """The entries of a mapping, those of a group with both parts of their names."""
        for name, entry in value.items():
            if self.grouped and isinstance(entry, Mapping):
                yield from ((f"{name}.{part}", inner) for part, inner in entry.items())
            else:
                yield name, entry

    def _read(self, text: str) -> str | int | bool:
        if text in self.words:
            return text
        if self.flag and text.lower() in (*_YES, *_NO):
            return text.lower() in _YES
        if self.number and _NUMBER.fullmatch(text):
            return int(text)
        if self.text and text:
            return text
        raise ValueError(text)

    def __str__(self) -> str:
        """What to call such values, as in "it takes …"."""
        names = [
            *(["true", "false"] if self.flag else []),
            *self.words,
            *(["a whole number"] if self.number else []),
            *(["text"] if self.text else []),
            *(["texts by name"] if self.pairs else []),
            *(["text, or a list of texts"] if self.many else []),
        ]
        return " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _either(one: Kind, other: Kind) -> Kind:
    """A union: words of both, and whatever one of them takes."""
    words = one.words + other.words
    return Kind(words, *(mine or others for mine, others in zip(one[1:], other[1:], strict=True)))


def _text(value: object) -> str:
    """A name or an entry: numbers as Python writes them, but no truth value, which would come out as True."""
    if isinstance(value, str | int | float | os.PathLike) and not isinstance(value, bool):
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    raise ValueError(value)


def _word(value: object) -> str:
    """An entry of a list, which is not empty."""
    if text := _text(value):
        return text
    raise ValueError(value)


class About(NamedTuple):
    """What there is to say about an option besides its name and type."""

    help: str
    """What it does, in one or two sentences without Markdown."""
    metavar: str = ""
    """What stands for its value in a synopsis; its name where this is empty."""
    default: Any = None
    """What is taken where nobody gives a value."""
    default_words: str = ""
    """The same in words, where it depends on other things."""
    example: str = ""
    """A value, where there is no default to show how one looks."""
    directive: bool = False
    """Whether it goes to sbatch as the option of the same name."""
    in_files: bool = True
    """Whether it can stand in a file, and after `--set`."""
    is_path: Callable[[str], bool] | None = None
    """Tells of a value that is a path, which in a file is meant from that file's folder."""


class Option(NamedTuple):
    """An option of a submission."""

    name: str
    """In Python and in files."""
    group: str
    """Heading under which it is shown."""
    kind: Kind
    about: About

    @property
    def flag(self) -> str:
        """On the command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def metavar(self) -> str:
        """What stands for its value: its words, where it takes nothing else; empty for a flag."""
        if self.kind.flag:
            return ""
        words = "" if self.kind.text else "|".join(self.kind.words)
        return self.about.metavar or words or self.name.upper()

    @property
    def default(self) -> str:
        """What is taken where nobody gives a value, in words; empty for nothing at all."""
        return self.about.default_words or ("" if self.about.default is None else str(self.about.default))
