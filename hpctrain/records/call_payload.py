"""Pickled calls, sent to the ranks, and their results, sent back.

Functions of `__main__`, lambdas and closures are pickled by value (cloudpickle). Functions of a module are
pickled by name and imported by the calling process.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from msgspec import Struct

from hpctrain.errors import UserError
from hpctrain.files import write_atomic


class FunctionCall:
    """A call of a function. A plain class, whose pickles remain readable if its fields stay."""

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs or {}

    @property
    def name(self) -> str:
        """Name of the function, for messages."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return str(getattr(function, "__name__", type(function).__name__))

    def __call__(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    def to_bytes(self) -> bytes:
        named_values = [
            ("the function", self.function),
            *((f"argument {i}", value) for i, value in enumerate(self.args)),
            *((f"argument {name}", value) for name, value in self.kwargs.items()),
        ]
        return dumps(self, self.name, named_values)


class CallPayload(Struct, frozen=True):
    """A pickled call for the ranks, with the data required for unpickling."""

    call: bytes
    """The pickled call."""
    sys_path: tuple[str, ...]
    """Module search path of the program that submitted the call."""
    retry_on_exception: bool = False
    """True if the function is called again after it has raised an exception."""

    @classmethod
    def serialize(cls, call: FunctionCall, *, retry_on_exception: bool = False) -> Self:
        """Pack `call` with the module search path of this program."""
        paths = tuple(os.path.realpath(path) for path in sys.path)
        return cls(call.to_bytes(), paths, retry_on_exception)

    def deserialize(self) -> FunctionCall:
        """Unpickle the call. Imports the modules that it needs."""
        call = _CallUnpickler(io.BytesIO(self.call)).load()
        assert isinstance(call, FunctionCall)
        return call

    def to_bytes(self) -> bytes:
        return pickle.dumps((self.call, self.sys_path, self.retry_on_exception))

    def write(self, path: Path) -> None:
        write_atomic(path, self.to_bytes(), private=True)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the payload at `path`; its call is not unpickled."""
        return cls(*pickle.loads(path.read_bytes()))


class _CallUnpickler(pickle.Unpickler):
    """Also reads calls that earlier versions wrote, which had the class in another module."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("hpctrain.records.serialization", "FunctionCall"):
            return FunctionCall
        return super().find_class(module, name)


def dumps(value: Any, function_name: str, named_values: list[tuple[str, Any]]) -> bytes:
    import cloudpickle

    try:
        data: bytes = cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001 (pickling runs code of the value)
        name, culprit, reason = _find_unpicklable(named_values) or ("the value", value, error)
        raise UserError(
            f"{function_name}(): {name} has type {_type_name(culprit)}, which cannot be pickled: {reason}. "
            "Pass or return plain data instead, or create the object inside the function."
        ) from None
    return data


def _find_unpicklable(named_values: list[tuple[str, Any]]) -> tuple[str, Any, Exception] | None:
    """Return the innermost value that cannot be pickled: name, value, error."""
    innermost: tuple[str, Any, Exception] | None = None
    seen: set[int] = set()
    queue = iter(named_values)
    while (hit := next(_failures(queue, seen), None)) is not None:
        innermost = hit
        queue = _children(*hit[:2])
    return innermost


def _failures(
    named_values: Iterator[tuple[str, Any]], seen: set[int]
) -> Iterator[tuple[str, Any, Exception]]:
    import cloudpickle

    for name, value in named_values:
        if id(value) in seen:
            continue
        seen.add(id(value))
        try:
            cloudpickle.dump(value, io.BytesIO())
        except Exception as error:  # noqa: BLE001
            yield name, value, error


def _children(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the visible contents of `value`, each with a name."""
    match value:
        case dict():
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
        case list() | tuple():
            yield from ((f"{name}[{i}]", item) for i, item in enumerate(value))
        case set() | frozenset():
            yield from ((f"an element of {name}", item) for item in value)
        case types.FunctionType():
            used = inspect.getclosurevars(value)
            for variable, item in {**used.globals, **used.nonlocals}.items():
                yield f"the variable {variable} in {name}", item
        case types.MethodType():
            yield f"the object bound to {name}", value.__self__
        case functools.partial():
            yield f"{name}.func", value.func
            yield from _children(f"{name}.args", value.args)
            yield from _children(f"{name}.keywords", value.keywords)
    yield from ((f"{name}.{attribute}", item) for attribute, item in _attributes(value).items())


def _attributes(value: Any) -> dict[str, Any]:
    slots = {
        slot: getattr(value, slot)
        for base in type(value).__mro__
        for slot in getattr(base, "__slots__", ())
        if hasattr(value, slot)
    }
    return {**slots, **getattr(value, "__dict__", {})}


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
