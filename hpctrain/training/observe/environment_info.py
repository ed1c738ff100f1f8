"""Record of the environment and settings of a training run."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from hpctrain._version import __version__
from hpctrain.checkpoint.format.manifest import checksum
from hpctrain.rundir import CODE_VARIABLE
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.base.device_selection import cpu_model
from hpctrain.training.observe.dataloader_hints import count_rank_cpus
from hpctrain.training.trainer_config import TrainerConfig


def collect_environment(
    settings: TrainerConfig, context: DistributedContext, gradient_parts: Sequence[int]
) -> dict[str, Any]:
    """Return versions, machine, gradient buckets and settings, as plain values."""
    return {
        **collect_platform(context),
        "gradient_bytes": sum(gradient_parts) or None,
        "gradient_buckets": len(gradient_parts) or None,
        "settings": plain_config(settings),
    }


def collect_platform(context: DistributedContext) -> dict[str, Any]:
    """Return versions, machine and arguments, as plain values."""
    cuda = context.device.type == "cuda"
    nccl_version: Any = torch.cuda.nccl.version
    return {
        "hpctrain": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda if cuda else None,
        "nccl": ".".join(map(str, nccl_version())) if cuda else None,
        "gpu": torch.cuda.get_device_name(context.device) if cuda else None,
        "cpu": cpu_model(),
        "system": platform.platform(),
        "world_size": context.ranks.world_size,
        "cpus_per_rank": count_rank_cpus(context.ranks.local_world_size),
        "threads_per_rank": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "args": shlex.join(sys.argv[1:]),
    }


def hash_code(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the checksum of the script and of each module that it imported from its folders, by path.

    Paths are relative to the code snapshot, or to the folder of the script or the working directory.
    Installed packages are omitted.
    """
    script = os.path.realpath(sys.argv[0])
    folders = [environ.get(CODE_VARIABLE) or os.path.dirname(script), os.getcwd()]
    roots = list(map(os.path.realpath, folders))
    files = {script}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Resolving the links of thousands of installed files takes half a second.
        if file and name.partition(".")[0] != "hpctrain" and not _is_installed(file):
            files.add(os.path.realpath(file))
    found: dict[str, str] = {}
    for file in files:
        root = next((root for root in roots if file.startswith(root + os.sep)), None)
        if root is not None and file.endswith(".py") and not _is_installed(file):
            with suppress(OSError):
                found[os.path.relpath(file, root)] = checksum(Path(file)).xxh3_128
    return dict(sorted(found.items()))


def _is_installed(file: str) -> bool:
    """True if a file belongs to Python or to an installed package."""
    return file.startswith(sys.base_prefix + os.sep) or "site-packages" in file


def plain_config(settings: TrainerConfig) -> dict[str, Any]:
    """Return the settings that are plain values."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    return {
        name: value
        for name, value in values.items()
        if value is None or isinstance(value, str | int | float | bool)
    }
