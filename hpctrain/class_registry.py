"""Find classes by name: those of hpctrain, other packages and scripts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from hpctrain.errors import UserError
from hpctrain.text import suggest

T = TypeVar("T")


@dataclass
class Registry(Generic[T]):
    """Subclasses of a class by name; those of a script replace those of other packages and of hpctrain."""

    setting: str
    """The setting for the name, for messages."""
    kind: type[T]
    """Base class or protocol of the classes."""
    ours: Mapping[str, str]
    """Classes of hpctrain: name and "module:Class", relative to the package of `kind`.

    Each is imported only on request, because some import large libraries.
    """
    group: str | None = None
    """Entry point group of installed packages: name = "module:Class"."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Unsupported names, each with an explanation."""
    registered: dict[str, type[T]] = field(default_factory=dict)
    """Classes registered by a script."""

    def register(self, name: str) -> Callable[[type[T]], type[T]]:

        def register(kind: type[T]) -> type[T]:
            self.registered[name] = kind
            return kind

        return register

    def find(self, name: str, origin: str | None = None) -> type[T]:
        origin = origin or self.setting
        if not isinstance(name, str):
            raise UserError(f"{origin} is {name!r}, but must be a name, such as {next(iter(self.ours))!r}.")
        if name in self.registered:
            return self.registered[name]
        packaged = _entry_points(self.group, tuple(sys.path)) if self.group else {}
        if name in packaged:
            kind = packaged[name].load()
            if not (isinstance(kind, type) and issubclass(kind, self.kind)):
                raise UserError(
                    f"{origin} is {name!r}. An installed package registers this name for "
                    f"{packaged[name].value}, which is not a subclass of "
                    f"{self.kind.__module__}.{self.kind.__name__}."
                )
            return kind
        if name in self.ours:
            package = self.kind.__module__.rpartition(".")[0]
            ours: type[T] = EntryPoint(name, f"{package}.{self.ours[name]}", "").load()
            return ours
        if name in self.refused:
            raise UserError(f"{origin} is {name!r}. {self.refused[name]}")
        names = [*self.ours, *packaged, *self.registered]
        hint = suggest(name, names, otherwise="")
        raise UserError(
            f"{origin} is {name!r}, but must be one of {', '.join(map(repr, names))}. {hint}".rstrip()
        )


@cache
def _entry_points(group: str, _path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Return the entry points of a group in the packages of `sys.path`. A search takes 50 milliseconds."""
    return {point.name: point for point in entry_points(group=group)}
