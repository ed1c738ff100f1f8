"""Algorithms by name: those that come with hpctrain, and those of a script."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points

from hpctrain.errors import UserError
from hpctrain.training.algorithms.base import Algorithm

#: Entry points of installed packages: name = "module:Class".
ENTRY_POINTS = "hpctrain.algorithms"

_HERE = __name__.rpartition(".")[0]
_OURS = {
    "allreduce": "base:AllReduce",
    "fp16": "halved:Float16",
    "bf16": "halved:BFloat16",
    "powersgd": "powersgd:PowerSGD",
    "bytegrad": "bytegrad:ByteGrad",
    "qadam": "qadam:QAdam",
    "decentralized": "decentralized:Decentralized",
    "low_precision_decentralized": "decentralized:LowPrecisionDecentralized",
    "async": "averaging:Async",
    "local_sgd": "averaging:LocalSGD",
}
_REGISTERED: dict[str, type[Algorithm]] = {}


def register_algorithm(name: str) -> Callable[[type[Algorithm]], type[Algorithm]]:
    """Decorate a subclass of `Algorithm`, for `Trainer(algorithm=name)` to find; also in place of ours."""

    def register(kind: type[Algorithm]) -> type[Algorithm]:
        _REGISTERED[name] = kind
        return kind

    return register


def find_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """The algorithm of that name, newly made; one that was made already is returned as it is.

    Raises:
        UserError: there is none.
    """
    if isinstance(algorithm, Algorithm):
        return algorithm
    if algorithm in _REGISTERED:
        return _REGISTERED[algorithm]()
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if algorithm in others:
        made: Algorithm = others[algorithm].load()()
        return made
    if algorithm in _OURS:
        module, _, attribute = _OURS[algorithm].partition(":")
        ours: Algorithm = getattr(import_module(f"{_HERE}.{module}"), attribute)()
        return ours
    known = [*_OURS, *others, *_REGISTERED]
    close = get_close_matches(str(algorithm), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UserError(f"algorithm is {algorithm!r}; known are {', '.join(map(repr, known))}.{hint}")
