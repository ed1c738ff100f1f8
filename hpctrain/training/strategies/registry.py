"""Strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpctrain.training.registry import Registry
from hpctrain.training.strategies.base import Strategy

#: What the job asks for; the template ddp2 sets it.
STRATEGY_VARIABLE = "HPCTRAIN_STRATEGY"

STRATEGIES: Registry[Strategy] = Registry(
    setting="strategy",
    group="hpctrain.strategies",
    kind=Strategy,
    ours={
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
    },
    refused={
        "tpu": "hpctrain is for clusters of GPUs, and TPUs are not among what it trains on. "
        "Take PyTorch/XLA for them.",
        "ddp_find_unused_parameters_true": "take 'ddp' with find_unused_parameters=True.",
        "bagua": "its algorithms are there natively. Take 'ddp' with algorithm='bytegrad' or another one.",
        "deepspeed": "its stages are there natively. Take 'zero1', 'zero2' or 'zero3'.",
    },
)


def register_strategy(name: str) -> Callable[[type[Strategy]], type[Strategy]]:
    """Decorate a subclass of `Strategy`, so that `Trainer(strategy=name)` finds it; also in place of ours."""
    return STRATEGIES.register(name)


def chosen_name(environ: Mapping[str, str]) -> str:
    """What "auto" stands for: the strategy that the job asks for, or else ddp."""
    return environ.get(STRATEGY_VARIABLE) or "ddp"


def find_strategy(name: str, environ: Mapping[str, str]) -> type[Strategy]:
    """The strategy of that name; for "auto" the one that the job asks for, or else ddp.

    Raises:
        UserError: there is none.
    """
    if name == "auto":
        return STRATEGIES.find(chosen_name(environ), STRATEGY_VARIABLE)
    return STRATEGIES.find(name)
