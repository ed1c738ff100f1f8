"""Record the environment of a training run."""

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
from hpctrain.text import pluralize
from hpctrain.training.base.device_selection import cpu_model
from hpctrain.training.trainer_config import TrainerConfig


def collect_environment(
    settings: TrainerConfig, context: DistributedContext, gradient_parts: Sequence[int]
) -> dict[str, Any]:
    return {
        **collect_platform(context),
        "gradient_bytes": sum(gradient_parts) or None,
        "gradient_buckets": len(gradient_parts) or None,
        "settings": {
            field.name: value
            for field in fields(settings)
            if isinstance(value := getattr(settings, field.name), str | int | float | bool | None)
        },
    }


def collect_platform(context: DistributedContext) -> dict[str, Any]:
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


#: Minimum training time in seconds, and minimum fraction of waiting, for a hint.
_SEEN_S, _SHARE = 10.0, 0.2


def hash_code(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the checksum of the script and of each module that it imported from its folders, by path."""
    script = os.path.realpath(sys.argv[0])
    roots = [*map(os.path.realpath, (environ.get(CODE_VARIABLE) or os.path.dirname(script), os.getcwd()))]
    files = {script}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # Resolving the links of thousands of installed files takes half a second.
        if file and name.partition(".")[0] != "hpctrain" and not _is_installed(file):
            files.add(os.path.realpath(file))
    checksums: dict[str, str] = {}
    for file in files:
        root = next((root for root in roots if file.startswith(root + os.sep)), None)
        if root is not None and file.endswith(".py") and not _is_installed(file):
            with suppress(OSError):
                checksums[os.path.relpath(file, root)] = checksum(Path(file)).xxh3_128
    return dict(sorted(checksums.items()))


def _is_installed(file: str) -> bool:
    return file.startswith(sys.base_prefix + os.sep) or "site-packages" in file


def count_rank_cpus(ranks_here: int) -> int:
    """Return the number of processors bound to this rank, or its share of the machine's processors."""
    on_machine = os.cpu_count() or 1
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else on_machine
    return bound if bound < on_machine else max(1, on_machine // max(1, ranks_here))


def warn_too_few_workers(waited_s: float, all_s: float, num_workers: int, cpus: int) -> str | None:
    """Return a hint during training; None if it is too early, or if waits for data were short."""
    if all_s < _SEEN_S or waited_s < _SHARE * all_s:
        return None
    finding = (
        f"Training spent {waited_s / all_s:.0%} of the first {all_s:.0f} s waiting for data with "
        f"num_workers={num_workers}"
    )
    proposed = min(max(2 * num_workers, 1), cpus)
    if proposed > num_workers:
        return f"{finding}. Each rank has {pluralize(cpus, 'CPU')}, so try num_workers={proposed}."
    return (
        f"{finding}, and each rank has only {pluralize(cpus, 'CPU')}. Request more CPUs with "
        "--cpus-per-task, or make data loading faster."
    )
