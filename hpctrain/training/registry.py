"""Classes that are asked for by name: hpctrain's own, those of other packages, those of a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from hpctrain.errors import UserError

T = TypeVar("T")


@dataclass
class Registry(Generic[T]):
    """The subclasses of one class, by name.

    What a script has registered goes before what other packages bring, and that before ours.
    """

    setting: str
    """The setting that takes the name, for messages."""
    group: str
    """Entry points of installed packages: name = "module:Class"."""
    kind: type[T]
    """What they are subclasses of."""
    ours: Mapping[str, str]
    """Those that come with hpctrain: name and "module:Class", the module beside that of `kind`.

    Each is imported when it is asked for: some bring large libraries.
    """
    refused: Mapping[str, str] = field(default_factory=dict)
    """Names that people may ask for in vain, and what they are told."""
    registered: dict[str, type[T]] = field(default_factory=dict)
    """Those of a script."""

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """A decorator for a class that is to be found by this name."""

        def register(kind: type[T]) -> type[T]:
            self.registered[name] = kind
            return kind

        return register

    def find(self, name: str, origin: str | None = None) -> type[T]:
        """The class of that name.

        Args:
            name: what the user has set.
            origin: where, if it is not the setting.

        Raises:
            UserError: there is none.
        """
        origin = origin or self.setting
        if not isinstance(name, str):
            raise UserError(f"{origin} is {name!r}; give a name, such as {next(iter(self.ours))!r}.")
        if name in self.registered:
            return self.registered[name]
        others = {point.name: point for point in entry_points(group=self.group)}
        if name in others:
            kind = others[name].load()
            if not (isinstance(kind, type) and issubclass(kind, self.kind)):
                raise UserError(
                    f"{origin} is {name!r}, for which an installed package names {others[name].value}: "
                    f"that is no subclass of {self.kind.__module__}.{self.kind.__name__}."
                )
            return kind
        if name in self.ours:
            module, _, attribute = self.ours[name].partition(":")
            package = self.kind.__module__.rpartition(".")[0]
            ours: type[T] = getattr(import_module(f"{package}.{module}"), attribute)
            return ours
        if name in self.refused:
            raise UserError(f"{origin} is {name!r}: {self.refused[name]}")
        known = [*self.ours, *others, *self.registered]
        close = get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise UserError(f"{origin} is {name!r}; known are {', '.join(map(repr, known))}.{hint}")
