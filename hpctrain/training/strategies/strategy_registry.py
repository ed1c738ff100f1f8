"""Registry of strategies by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hpctrain.class_registry import Registry
from hpctrain.training.strategies.base import Strategy

#: Environment variable that names the job's strategy; the template ddp2 sets this variable.
STRATEGY_VARIABLE = "HPCTRAIN_STRATEGY"

STRATEGIES: Registry[Strategy] = Registry(
    setting="strategy",
    group="hpctrain.strategies",
    kind=Strategy,
    ours={
        "ddp": "ddp:DDP",
        "ddp_spawn": "ddp:DDPSpawn",
        "ddp2": "ddp2:DDP2",
        "dp": "dp:DP",
        "horovod": "horovod:Horovod",
        "pipeline": "pipeline:Pipeline",
        "zero1": "zero1:ZeRO1",
        "zero2": "fully_sharded:ZeRO2",
        "ddp_sharded": "fully_sharded:ZeRO2",
        "zero3": "fully_sharded:ZeRO3",
        "fsdp": "fully_sharded:ZeRO3",
    },
    refused={
        "tpu": "hpctrain does not support TPUs. Use PyTorch/XLA.",
        "ddp_find_unused_parameters_true": "Use 'ddp' with find_unused_parameters=True.",
        "bagua": "hpctrain has its own communication algorithms. Use 'ddp' with one of these, for example "
        "algorithm='bytegrad'.",
        "deepspeed": "hpctrain has its own ZeRO strategies. Use 'zero1', 'zero2' or 'zero3'.",
    },
)


def register_strategy(name: str) -> Callable[[type[Strategy]], type[Strategy]]:
    """Register a subclass of `Strategy` for `Trainer(strategy=name)`; a built-in name is replaced."""
    return STRATEGIES.register(name)


def resolve_auto(environ: Mapping[str, str]) -> str:
    """Return the strategy for "auto": the strategy requested by the job, otherwise ddp."""
    return environ.get(STRATEGY_VARIABLE) or "ddp"


def find_strategy(name: str, environ: Mapping[str, str]) -> type[Strategy]:
    """Return the strategy of that name; for "auto", the strategy requested by the job, otherwise ddp.

    Raises:
        UserError: no strategy has this name.
    """
    if name == "auto":
        return STRATEGIES.find(resolve_auto(environ), STRATEGY_VARIABLE)
    return STRATEGIES.find(name)
