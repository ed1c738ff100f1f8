"""Algorithms by name."""

from __future__ import annotations

from collections.abc import Callable

from hpctrain.training.algorithms.base import Algorithm
from hpctrain.training.registry import Registry

ALGORITHMS: Registry[Algorithm] = Registry(
    setting="algorithm",
    group="hpctrain.algorithms",
    kind=Algorithm,
    ours={
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
    },
)


def register_algorithm(name: str) -> Callable[[type[Algorithm]], type[Algorithm]]:
    """Decorate a subclass of `Algorithm`, for `Trainer(algorithm=name)` to find; also in place of ours."""
    return ALGORITHMS.register(name)


def find_algorithm(algorithm: str | Algorithm) -> Algorithm:
    """The algorithm of that name, newly made; one that was made already is returned as it is.

    Raises:
        UserError: there is none.
    """
    return algorithm if isinstance(algorithm, Algorithm) else ALGORITHMS.find(algorithm)()
