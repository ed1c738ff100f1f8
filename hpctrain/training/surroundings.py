"""What a training runs on and with which settings, for whoever reads of it later."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from hpctrain import __version__
from hpctrain.runtime.process_group import Team
from hpctrain.training.settings import Settings


def describe(settings: Settings, team: Team, gradient_parts: Sequence[int]) -> dict[str, Any]:
    """Versions, machine, the parts in which gradients are sent, and settings, as plain values."""
    cuda = team.device.type == "cuda"
    nccl_version: Any = torch.cuda.nccl.version
    return {
        "hpctrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, nccl_version())) if cuda else None,
        "gpu": torch.cuda.get_device_name(team.device) if cuda else None,
        "system": platform.platform(),
        "world_size": team.ranks.world_size,
        "cpus_per_rank": _cpus(),
        "threads_per_rank": torch.get_num_threads(),
        "gradient_bytes": sum(gradient_parts) or None,
        "gradient_buckets": len(gradient_parts) or None,
        "args": shlex.join(sys.argv[1:]),
        "settings": plain_settings(settings),
    }


def plain_settings(settings: Settings) -> dict[str, Any]:
    """The settings that are plain values."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {
        name: value
        for name, value in values.items()
        if value is None or isinstance(value, str | int | float | bool)
    }


def _cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
