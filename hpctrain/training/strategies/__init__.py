"""Find strategies, which divide the work among the ranks, and check the settings against them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from hpctrain.class_registry import Registry
from hpctrain.cluster import Ranks
from hpctrain.cluster.device_plan import gpus_per_task
from hpctrain.cluster.visible_gpus import VISIBLE_VARIABLE
from hpctrain.errors import UserError
from hpctrain.rundir import ATTEMPT_VARIABLE, VERIFY_STEPS_VARIABLE
from hpctrain.text import pluralize
from hpctrain.training.algorithms import find_algorithm
from hpctrain.training.algorithms.algorithm import AllReduce
from hpctrain.training.base.device_selection import has_launcher, parse_devices
from hpctrain.training.strategies.strategy import Strategy
from hpctrain.training.trainer_config import TrainerConfig

__all__ = ["STRATEGY_VARIABLE", "Strategy", "find_strategy", "register_strategy"]


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
        "zero1": "sharded:ZeRO1",
        "zero2": "sharded:ZeRO2",
        "ddp_sharded": "sharded:ZeRO2",
        "zero3": "sharded:ZeRO3",
        "fsdp": "sharded:ZeRO3",
    },
    refused={
        "tpu": "hpctrain does not support TPUs. Use PyTorch/XLA.",
        "deepspeed": "hpctrain has its own ZeRO strategies. Use 'zero1', 'zero2' or 'zero3'.",
        "fsdp_cpu_offload": "hpctrain keeps all states on the GPUs. Use 'fsdp'.",
        **{
            f"deepspeed_stage_{stage}{offload}": "hpctrain has its own ZeRO strategies, which keep all "
            f"states on the GPUs. Use 'zero{stage}'."
            for stage in (1, 2, 3)
            for offload in ("", "_offload", "_offload_nvme")
        },
    },
)


def register_strategy(name: str) -> Callable[[type[Strategy]], type[Strategy]]:
    """Register a subclass of `Strategy` for `Trainer(strategy=name)`; a built-in name is replaced."""
    return STRATEGIES.register(name)


def find_strategy(name: str, environ: Mapping[str, str]) -> type[Strategy]:
    """Return the strategy of that name; for "auto", the strategy requested by the job, otherwise ddp."""
    if name == "auto":
        return STRATEGIES.find(environ.get(STRATEGY_VARIABLE) or "ddp", STRATEGY_VARIABLE)
    return STRATEGIES.find(name)


def resolve_strategy(settings: TrainerConfig, environ: Mapping[str, str]) -> None:
    strategy = find_strategy(settings.strategy, environ)
    if settings.strategy == "auto":
        settings.strategy = environ.get(STRATEGY_VARIABLE) or "ddp"
    strategy.check(settings)
    if settings.bucket_cap_mb is not None and not strategy.has_buckets:
        raise UserError(
            f"bucket_cap_mb is {settings.bucket_cap_mb!r}, but strategy is {settings.strategy!r}. "
            "bucket_cap_mb applies only to 'ddp', 'ddp_spawn', 'ddp2' and 'zero1'. Remove this setting."
        )
    if settings.static_graph and (not strategy.has_buckets or settings.find_unused_parameters):
        raise UserError(
            f"static_graph is True, but strategy is {settings.strategy!r} and find_unused_parameters is "
            f"{settings.find_unused_parameters}. static_graph requires strategy 'ddp', 'ddp_spawn', 'ddp2' "
            "or 'zero1', and find_unused_parameters=False."
        )
    algorithm = find_algorithm(settings.algorithm)
    if type(algorithm) is not AllReduce and not strategy.has_algorithms:
        raise UserError(
            f"algorithm is {settings.algorithm!r}, but strategy is {settings.strategy!r}. Communication "
            "algorithms work only with 'ddp' and 'ddp_spawn'. Use one of these, or remove algorithm."
        )
    algorithm.check(settings)


def check_launch(settings: TrainerConfig, ranks: Ranks, environ: Mapping[str, str]) -> None:
    """Check that this process has the requested devices; the nodes only in the first attempt."""
    given = settings.given
    if settings.accelerator == "gpu" and not torch.cuda.is_available():
        visible = environ.get(VISIBLE_VARIABLE)
        hidden = "" if visible is None else f" ({VISIBLE_VARIABLE} is {visible!r})"
        raise UserError(
            f"{given['accelerator']} requires a GPU, but PyTorch {torch.__version__} finds none{hidden}. "
            "Request GPUs with `hpctrain submit --gpus-per-node`, or set accelerator='cpu'."
        )
    if not has_launcher(ranks):
        if (settings.num_nodes or 1) > 1:
            script = Path(sys.argv[0]).name or "SCRIPT"
            raise UserError(
                f"{given['num_nodes']}, but this process was started without a launcher, so it has one "
                f"node. Run `hpctrain submit --nodes {settings.num_nodes} {script}`."
            )
        return
    if environ.get(ATTEMPT_VARIABLE, "0") != "0" or VERIFY_STEPS_VARIABLE in environ:
        return
    if settings.num_nodes not in (None, ranks.num_nodes):
        origin = ranks.sources.get("num_nodes", ranks.environment)
        raise UserError(
            f"{given['num_nodes']}, but the number of nodes is {ranks.num_nodes} ({origin}). Start the "
            f"script on {settings.num_nodes} nodes, or remove num_nodes."
        )
    devices = None if settings.devices is None else parse_devices(settings.devices)
    is_single = ranks.world_size == 1 and find_strategy(settings.strategy, environ).single_process
    if devices in (None, -1) or is_single:
        return
    # With Horovod's launcher, scripts state the devices of each process.
    num_ranks = 1 if settings.strategy == "horovod" and devices in (1, [0]) else ranks.local_world_size
    counts = {num_ranks, num_ranks * max(1, gpus_per_task(environ))}
    if devices not in (*counts, *([*range(count)] for count in counts)):
        origin = ranks.sources.get("local_world_size", ranks.environment)
        raise UserError(
            f"{given['devices']}, but the launcher started {pluralize(ranks.local_world_size, 'rank')} on "
            f"this node ({origin}), and assigns a device to each rank. Set devices={ranks.local_world_size}, "
            "remove this setting, or start another number of ranks."
        )
