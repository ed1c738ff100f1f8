"""Which GPU a rank computes on, as far as variables and the number of visible GPUs tell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.variables import read_int
from hpctrain.errors import EnvironmentMismatch

#: Set to 1, several ranks may compute on one GPU.
SHARE_VARIABLE = "HPCTRAIN_SHARE_GPUS"
VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
#: GPUs that a job step has on this node, whichever of them a task sees.
_ON_NODE_VARIABLE = "SLURM_GPUS_ON_NODE"
#: How Slurm bound the tasks of a step: `gpu:single:2`, which is what --ntasks-per-gpu=2 becomes too.
_BIND_VARIABLE = "SLURMD_TRES_BIND"

_ORDINAL = re.compile(r"\s*(\d+)")
_SEVERAL_TASKS = re.compile(r"single:(?!1\b)\d+")


@dataclass(frozen=True)
class DevicePlan:
    """The device of one rank, and why it is that one."""

    index: int | None
    """Number of the GPU among those that are visible, as `cuda:N` counts; None for the CPU."""
    source: str
    """The variable or the reasoning that gave it."""

    def __str__(self) -> str:
        return "cpu" if self.index is None else f"cuda:{self.index}"


def plan_device(ranks: Ranks, environ: Mapping[str, str], num_visible: int) -> DevicePlan:
    """The GPU of this rank where all ranks keep to the same plan.

    Where a task sees all GPUs of its node, it takes the one of its local rank. Where Slurm bound some of
    them to the task, what it bound is left as it is: a single one is taken, and of several the first.

    Args:
        ranks: who this process is.
        environ: its variables.
        num_visible: GPUs that the driver shows to this process.

    Raises:
        EnvironmentMismatch: the node has more ranks than GPUs, and sharing them is not allowed.
    """
    if num_visible and is_mig(environ):
        # CUDA shows a process the first of the MIG instances that are listed, and no other.
        num_visible = 1
    if num_visible == 0:
        return DevicePlan(None, _why_no_gpu(environ))
    on_node = _gpus_on_node(ranks, environ)
    num_tasks, local_rank = ranks.local_world_size, ranks.local_rank
    if num_visible < on_node:
        bound = f"bound to this task by Slurm, of {on_node} ({_ON_NODE_VARIABLE})"
        if num_visible == 1:
            return DevicePlan(0, f"the one {bound}")
        if num_tasks * num_visible <= on_node:
            return DevicePlan(0, f"the first of {num_visible} {bound}")
        return DevicePlan(local_rank % num_visible, f"one of {num_visible} {bound}")
    allowed = sharing_allowed(environ)
    # A single visible GPU may be this rank's own: outside of Slurm only its UUID tells.
    if num_tasks > num_visible and (num_visible > 1 or on_node == 1):
        if allowed is None:
            raise _too_many_ranks(ranks, environ, num_visible)
        return DevicePlan(local_rank % num_visible, f"local rank modulo {num_visible} visible ({allowed})")
    if num_visible == 1:
        return DevicePlan(0, f"the only one visible{_list(environ)}")
    return DevicePlan(local_rank, f"local rank, of {num_visible} visible{_list(environ)}")


def sharing_allowed(environ: Mapping[str, str]) -> str | None:
    """What allows several ranks on one GPU: the user's switch, or how the job was asked for; None if nothing.

    Raises:
        EnvironmentMismatch: HPCTRAIN_SHARE_GPUS is neither 1 nor 0.
    """
    switch = environ.get(SHARE_VARIABLE, "")
    if switch not in ("", "0", "1"):
        raise EnvironmentMismatch(
            f"{SHARE_VARIABLE} is {switch!r}. Set it to 1 to let ranks share GPUs, or to 0."
        )
    if switch:
        return f"{SHARE_VARIABLE}=1" if switch == "1" else None
    if _SEVERAL_TASKS.search(environ.get(_BIND_VARIABLE, "")):
        return f"{_BIND_VARIABLE}={environ[_BIND_VARIABLE]}"
    for name in ("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES"):
        if name in environ and read_int(environ, name) > 1:
            return f"{name}={environ[name]}"
    return "SLURM_SHARDS_ON_NODE" if "SLURM_SHARDS_ON_NODE" in environ else None


def visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """The entries of CUDA_VISIBLE_DEVICES that CUDA looks at; None where all GPUs are visible.

    CUDA reads numbers or UUIDs, stops at the first entry that is neither, and takes a list that names a
    device twice for an empty one (CUDA C++ Programming Guide, "CUDA Environment Variables"). Slurm
    writes NoDevFiles where a job has no GPU.
    """
    text = environ.get(VISIBLE_VARIABLE)
    if text is None:
        return None
    entries: list[str] = []
    by_uuid = text.lstrip().startswith(("GPU-", "MIG-"))
    for raw in text.split(","):
        number = _ORDINAL.match(raw)
        if by_uuid and raw.strip().startswith(("GPU-", "MIG-")):
            entry = raw.strip()
        elif not by_uuid and number:
            entry = str(int(number[1]))
        else:
            break
        if entry in entries:
            return []
        entries.append(entry)
    return entries


def is_mig(environ: Mapping[str, str]) -> bool:
    """Whether parts of GPUs, and not whole ones, are what is visible."""
    return (visible_devices(environ) or [""])[0].startswith("MIG-")


def _gpus_on_node(ranks: Ranks, environ: Mapping[str, str]) -> int:
    """GPUs of the job step on this node, or 0 where that is not known."""
    if ranks.environment != "slurm" or not environ.get(_ON_NODE_VARIABLE):
        return 0
    return read_int(environ, _ON_NODE_VARIABLE)


def _why_no_gpu(environ: Mapping[str, str]) -> str:
    listed = visible_devices(environ)
    if listed == []:
        return f"{VISIBLE_VARIABLE}={environ[VISIBLE_VARIABLE]!r} shows none"
    if listed:
        return f"no driver shows a GPU, though {VISIBLE_VARIABLE}={environ[VISIBLE_VARIABLE]}"
    return "no driver shows a GPU"


def _list(environ: Mapping[str, str]) -> str:
    text = environ.get(VISIBLE_VARIABLE)
    return "" if text is None else f" ({VISIBLE_VARIABLE}={text})"


def _too_many_ranks(ranks: Ranks, environ: Mapping[str, str], num_visible: int) -> EnvironmentMismatch:
    gpus = "1 GPU is" if num_visible == 1 else f"{num_visible} GPUs are"
    source = ranks.sources.get("local_world_size", ranks.environment)
    return EnvironmentMismatch(
        f"{ranks.local_world_size} ranks on this node ({source}), but only {gpus} visible here"
        f"{_list(environ)}. Ask for {ranks.local_world_size} GPUs a node "
        f"(--gpus-per-node={ranks.local_world_size}), start fewer ranks, or set {SHARE_VARIABLE}=1 to let "
        "ranks share a GPU."
    )
