"""Strategies by name: those that come with hpctrain, those of other packages, those of a script."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points

from hpctrain.errors import UserError
from hpctrain.training.strategies.base import Strategy

#: What the job asks for; the template ddp2 sets it.
STRATEGY_VARIABLE = "HPCTRAIN_STRATEGY"
#: Entry points of installed packages: name = "module:Class".
ENTRY_POINTS = "hpctrain.strategies"

_HERE = __name__.rpartition(".")[0]
#: Imported when it is asked for: some bring large libraries.
_OURS = {
    "ddp": "ddp:DDP",
    "ddp_spawn": "ddp_spawn:DDPSpawn",
    "ddp2": "ddp2:DDP2",
    "dp": "dp:DP",
    "horovod": "horovod:Horovod",
    "pipeline": "pipeline:Pipeline",
    "zero1": "zero1:ZeRO1",
    "zero2": "sharded:ZeRO2",
    "ddp_sharded": "sharded:ZeRO2",
    "zero3": "sharded:ZeRO3",
    "fsdp": "sharded:ZeRO3",
}
_REFUSED = {
    "tpu": "hpctrain is for clusters of GPUs, and TPUs are not among what it trains on. "
    "Take PyTorch/XLA for them.",
}
_REGISTERED: dict[str, type[Strategy]] = {}


def register_strategy(name: str) -> Callable[[type[Strategy]], type[Strategy]]:
    """Decorate a subclass of `Strategy`, so that `Trainer(strategy=name)` finds it; also in place of ours."""

    def register(kind: type[Strategy]) -> type[Strategy]:
        _REGISTERED[name] = kind
        return kind

    return register


def chosen_name(environ: Mapping[str, str]) -> str:
    """What "auto" stands for: the strategy that the job asks for, or else ddp."""
    return environ.get(STRATEGY_VARIABLE) or "ddp"


def find_strategy(name: str, environ: Mapping[str, str]) -> type[Strategy]:
    """The strategy of that name; for "auto" the one that the job asks for, or else ddp.

    What a script has registered goes before what other packages bring, and that before ours.

    Raises:
        UserError: there is none.
    """
    origin = "strategy"
    if name == "auto":
        name, origin = chosen_name(environ), STRATEGY_VARIABLE
    if name in _REGISTERED:
        return _REGISTERED[name]
    others = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name in others:
        kind = others[name].load()
        if not (isinstance(kind, type) and issubclass(kind, Strategy)):
            raise UserError(
                f"{origin} is {name!r}, for which an installed package names {others[name].value}: "
                "that is no subclass of hpctrain.Strategy."
            )
        return kind
    if name in _OURS:
        module, _, attribute = _OURS[name].partition(":")
        ours: type[Strategy] = getattr(import_module(f"{_HERE}.{module}"), attribute)
        return ours
    if name in _REFUSED:
        raise UserError(f"{origin} is {name!r}: {_REFUSED[name]}")
    known = [*_OURS, *others, *_REGISTERED]
    close = get_close_matches(name, known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise UserError(f"{origin} is {name!r}; known are {', '.join(map(repr, known))}.{hint}")
