"""Registry of algorithms by name."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.class_registry import Registry
from hpctrain.training.algorithms.base import Algorithm

ALGORITHMS: Registry[Algorithm] = Registry(
    setting="algorithm",
    group="hpctrain.algorithms",
    kind=Algorithm,
    ours={
        "allreduce": "base:AllReduce",
        "fp16": "compression:Float16",
        "bf16": "compression:BFloat16",
        "powersgd": "powersgd:PowerSGD",
        "bytegrad": "compression:ByteGrad",
        "qadam": "qadam:QAdam",
        "decentralized": "decentralized:Decentralized",
        "low_precision_decentralized": "decentralized:LowPrecisionDecentralized",
        "async": "model_averaging:AsyncAveraging",
        "local_sgd": "model_averaging:LocalSGD",
    },
)


def register_algorithm(name: str) -> Callable[[type[Algorithm]], type[Algorithm]]:
    """Register a subclass of `Algorithm` for `Trainer(algorithm=name)`; a built-in name is replaced."""
    return ALGORITHMS.register(name)


def find_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """Return a new instance of the named algorithm; an instance is returned unchanged.

    Raises:
        UserError: there is no algorithm with this name.
    """
    return algorithm if isinstance(algorithm, Algorithm) else ALGORITHMS.find(algorithm)()
