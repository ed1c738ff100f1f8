"""Communication algorithms of `ddp`: ranks average gradients or weights with less communication."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from hpctrain.class_registry import Registry
from hpctrain.errors import UserError
from hpctrain.training.algorithms.algorithm import Algorithm

__all__ = ["Algorithm", "BaguaStrategy", "find_algorithm", "register_algorithm"]


ALGORITHMS: Registry[Algorithm] = Registry(
    setting="algorithm",
    group="hpctrain.algorithms",
    kind=Algorithm,
    ours={
        "allreduce": "algorithm:AllReduce",
        "fp16": "compression:Float16",
        "bf16": "compression:BFloat16",
        "powersgd": "compression:PowerSGD",
        "bytegrad": "compression:ByteGrad",
        "qadam": "compression:QAdam",
        "decentralized": "weight_averaging:Decentralized",
        "low_precision_decentralized": "weight_averaging:LowPrecisionDecentralized",
        "async": "weight_averaging:AsyncAveraging",
        "local_sgd": "weight_averaging:LocalSGD",
    },
)


#: Names of Bagua that differ from those here.
_BAGUA = {"gradient_allreduce": "allreduce"}


class BaguaStrategy:
    """Lightning's strategy of this name: `ddp` with one of Bagua's algorithms, as implemented here."""

    def __init__(self, algorithm: str = "gradient_allreduce", **arguments: Any) -> None:
        """Choose an algorithm by Bagua's name, with the arguments of the `Algorithm` here.

        Raises:
            UserError: the algorithm is unknown, or has no such argument.
        """
        kind = ALGORITHMS.find(_BAGUA.get(algorithm, algorithm))
        accepted = signature(kind).parameters
        for name in arguments:
            if name not in accepted:
                raise UserError(
                    f"BaguaStrategy received {name}={arguments[name]!r}, but the arguments of {algorithm!r} "
                    f"here are: {', '.join(accepted) or 'none'}. Remove {name}."
                )
        self.trainer_settings = {"strategy": "ddp", "algorithm": kind(**arguments)}
        self._name = algorithm

    def __repr__(self) -> str:
        return f"BaguaStrategy({self._name!r})"


def register_algorithm(name: str) -> Callable[[type[Algorithm]], type[Algorithm]]:
    """Register a subclass of `Algorithm` for `Trainer(algorithm=name)`; a built-in name is replaced."""
    return ALGORITHMS.register(name)


def find_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """Return a new instance of the named algorithm; an instance is returned unchanged."""
    if isinstance(algorithm, Algorithm):
        return algorithm
    return ALGORITHMS.find(_BAGUA.get(algorithm, algorithm) if isinstance(algorithm, str) else algorithm)()
