"""Record of a training's environment and settings."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from hpctrain._version import __version__
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.trainer_config import TrainerConfig


def collect_environment(
    settings: TrainerConfig, context: DistributedContext, gradient_parts: Sequence[int]
) -> dict[str, Any]:
    """Return versions, machine, gradient buckets and settings, as plain values."""
    cuda = context.device.type == "cuda"
    nccl_version: Any = torch.cuda.nccl.version
    return {
        "hpctrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, nccl_version())) if cuda else None,
        "gpu": torch.cuda.get_device_name(context.device) if cuda else None,
        "system": platform.platform(),
        "world_size": context.ranks.world_size,
        "cpus_per_rank": _cpus(),
        "threads_per_rank": torch.get_num_threads(),
        "gradient_bytes": sum(gradient_parts) or None,
        "gradient_buckets": len(gradient_parts) or None,
        "args": shlex.join(sys.argv[1:]),
        "settings": plain_config(settings),
    }


def plain_config(settings: TrainerConfig) -> dict[str, Any]:
    """Return the settings that are plain values."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {
        name: value
        for name, value in values.items()
        if value is None or isinstance(value, str | int | float | bool)
    }


def _cpus() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
