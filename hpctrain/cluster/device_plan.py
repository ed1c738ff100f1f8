"""Choose a rank's GPU from variables and the number of visible GPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpctrain.cluster.amd_gpus import HIP_VARIABLES, ROCR_VARIABLE, check_amd_variables
from hpctrain.cluster.env_variables import read_int
from hpctrain.cluster.ranks import Ranks
from hpctrain.cluster.visible_gpus import VISIBLE_VARIABLE, gpu_variables, is_mig, visible_devices
from hpctrain.errors import EnvironmentMismatch
from hpctrain.rundir import GPUS_PER_TASK_VARIABLE

#: If 1, several ranks may use one GPU.
SHARE_VARIABLE = "HPCTRAIN_SHARE_GPUS"
#: GPUs of a job step on this node, visible to this task or not.
_ON_NODE_VARIABLE = "SLURM_GPUS_ON_NODE"
#: Slurm's binding of tasks to GPUs: `gpu:single:2`, to which --ntasks-per-gpu=2 is translated, too.
_BIND_VARIABLE = "SLURMD_TRES_BIND"

_SEVERAL_TASKS = re.compile(r"single:(?!1\b)\d+")


@dataclass(frozen=True)
class DevicePlan:
    index: int | None
    """Index of the GPU among the visible ones, as in `cuda:N`; None for the CPU."""
    source: str

    def __str__(self) -> str:
        return "cpu" if self.index is None else f"cuda:{self.index}"


def plan_device(
    ranks: Ranks, environ: Mapping[str, str], num_visible: int, *, is_rocm: bool = False
) -> DevicePlan:
    """Return the GPU of this rank: that of its local rank or, if Slurm bound the task, one of the bound."""
    if is_rocm:
        check_amd_variables(environ)
    if num_visible and is_mig(environ):
        # CUDA shows a process only the first of the listed MIG instances.
        num_visible = 1
    if num_visible == 0:
        return DevicePlan(None, _no_gpu_reason(environ, is_rocm=is_rocm))
    if (per_task := gpus_per_task(environ)) > 1:
        index = own_gpus(ranks, environ, num_visible)[0]
        return DevicePlan(index, f"the first of {per_task} GPUs of this process ({GPUS_PER_TASK_VARIABLE})")
    knows_node = ranks.environment == "slurm" and environ.get(_ON_NODE_VARIABLE)
    on_node = read_int(environ, _ON_NODE_VARIABLE) if knows_node else 0
    num_tasks, local_rank = ranks.local_world_size, ranks.local_rank
    if num_visible < on_node:
        bound = f"bound to this task by Slurm; the node has {on_node} ({_ON_NODE_VARIABLE})"
        if num_visible == 1:
            return DevicePlan(0, f"the only GPU {bound}")
        if num_tasks * num_visible <= on_node:
            return DevicePlan(0, f"the first of {num_visible} GPUs {bound}")
        return DevicePlan(local_rank % num_visible, f"one of {num_visible} GPUs {bound}")
    allowed = gpu_sharing_reason(environ)
    # A single visible GPU may be bound to this rank: outside of Slurm, this is visible only from its UUID.
    if num_tasks > num_visible and (num_visible > 1 or on_node == 1):
        if allowed is None:
            gpus = "1 GPU is" if num_visible == 1 else f"{num_visible} GPUs are"
            raise EnvironmentMismatch(
                f"There are {num_tasks} ranks on this node "
                f"({ranks.sources.get('local_world_size', ranks.environment)}), but only {gpus} visible to "
                f"this rank{_list(environ)}. Request {num_tasks} GPUs per node (--gpus-per-node="
                f"{num_tasks}), start fewer ranks, or set {SHARE_VARIABLE}=1 to let ranks share a GPU."
            )
        source = f"local rank modulo {num_visible} visible GPUs ({allowed})"
        return DevicePlan(local_rank % num_visible, source)
    if num_visible == 1:
        return DevicePlan(0, f"the only visible GPU{_list(environ)}")
    return DevicePlan(local_rank, f"the local rank; {num_visible} GPUs are visible{_list(environ)}")


def gpus_per_task(environ: Mapping[str, str]) -> int:
    """Return the number of GPUs that the job assigns to each of its processes; 0 if it assigns none."""
    return read_int(environ, GPUS_PER_TASK_VARIABLE) if GPUS_PER_TASK_VARIABLE in environ else 0


def own_gpus(ranks: Ranks, environ: Mapping[str, str], num_visible: int) -> list[int]:
    """Return the GPUs of a process that has several, as indices among the visible ones."""
    per_task = gpus_per_task(environ)
    if num_visible < per_task * ranks.local_world_size:
        return list(range(num_visible))
    return list(range(ranks.local_rank * per_task, (ranks.local_rank + 1) * per_task))


def own_gpu_variables(ranks: Ranks, environ: Mapping[str, str], num_visible: int) -> dict[str, str]:
    """Return the variables that show a process with several GPUs no others; empty for other processes."""
    if gpus_per_task(environ) < 2 or not num_visible:
        return {}
    listed = visible_devices(environ) or list(map(str, range(num_visible)))
    return gpu_variables([listed[index] for index in own_gpus(ranks, environ, num_visible)])


def gpu_sharing_reason(environ: Mapping[str, str]) -> str | None:
    """Return the setting of the user or the job that allows several ranks per GPU, or None."""
    switch = environ.get(SHARE_VARIABLE, "")
    if switch not in ("", "0", "1"):
        problem = f"{SHARE_VARIABLE} is {switch!r}, but must be 0, or 1 to let ranks share a GPU."
        raise EnvironmentMismatch(problem)
    if switch:
        return f"{SHARE_VARIABLE}=1" if switch == "1" else None
    if _SEVERAL_TASKS.search(environ.get(_BIND_VARIABLE, "")):
        return f"{_BIND_VARIABLE}={environ[_BIND_VARIABLE]}"
    for name in ("SLURM_NTASKS_PER_GPU", "SLURM_NTASKS_PER_TRES"):
        if name in environ and read_int(environ, name) > 1:
            return f"{name}={environ[name]}"
    return "SLURM_SHARDS_ON_NODE" if "SLURM_SHARDS_ON_NODE" in environ else None


def _no_gpu_reason(environ: Mapping[str, str], *, is_rocm: bool) -> str:
    if is_rocm:
        names = [name for name in (ROCR_VARIABLE, *HIP_VARIABLES) if name in environ]
        settings = ", ".join(f"{name}={environ[name]}" for name in names)
        return "no driver reports a GPU" + (settings and f" ({settings})")
    text = environ.get(VISIBLE_VARIABLE)
    if visible_devices(environ) == []:
        return f"{VISIBLE_VARIABLE}={text!r} hides all GPUs"
    return "no driver reports a GPU" + ("" if text is None else f", although {VISIBLE_VARIABLE}={text}")


def _list(environ: Mapping[str, str]) -> str:
    text = environ.get(VISIBLE_VARIABLE)
    return "" if text is None else f" ({VISIBLE_VARIABLE}={text})"
