"""Select devices by `Trainer(devices=…)` without a launcher."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from hpctrain.cluster import Ranks
from hpctrain.cluster.device_plan import gpus_per_task
from hpctrain.cluster.visible_gpus import visible_devices
from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.telemetry.sampling.nvml import GpuReader

#: A number of devices, their indices, "auto", or a number or indices as a string.
Devices = int | str | Sequence[int]

_FORMS = (
    "a number of devices (at least 1), -1 for all devices, a list of device indices such as [1, 3] or "
    "'1,3', or 'auto' for all free devices"
)


def parse_devices(devices: Devices) -> int | list[int] | None:
    """Return the number of devices (-1: all), their indices, or None for all free devices."""
    request: int | list[int] = 0
    match devices:
        case "auto":
            return None
        case str() if re.fullmatch(r"\s*-?\d+\s*", devices):
            request = int(devices)
        case str() if re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*,?\s*", devices):
            request = [int(index) for index in devices.split(",") if index.strip()]
        case bool() | str() | bytes():
            pass
        case int():
            request = devices
        case Sequence() if all(type(index) is int and index >= 0 for index in devices):
            request = [*devices]
    if request in (0, []) or (isinstance(request, int) and request < -1):
        raise UserError(f"devices is {devices!r}, but must be {_FORMS}.")
    if isinstance(request, list) and len(set(request)) < len(request):
        raise UserError(
            f"devices is {devices!r}, which lists a device more than once. List each device once."
        )
    return request


def choose_devices(devices: Devices, num_gpus: int, busy: Collection[int]) -> list[int | None]:
    """Return the selected indices among the visible GPUs; None means a process on the CPU."""
    request = parse_devices(devices)
    if num_gpus == 0:
        if isinstance(request, list):
            raise UserError(
                f"devices is {devices!r}, but no GPU is visible. To train on CPUs, set devices to the number "
                "of processes."
            )
        return [None] * (1 if request in (None, -1) else request or 1)
    if request == -1:
        return list(range(num_gpus))
    free = [index for index in range(num_gpus) if index not in busy]
    problem = None
    if isinstance(request, list):
        if max(request) >= num_gpus:
            problem = f"the last visible GPU has index {num_gpus - 1}. Use indices from 0 to {num_gpus - 1}"
    elif request is not None and request > num_gpus:
        problem = f"the number of visible GPUs is {num_gpus}. Set a smaller number"
    elif len(free) < (request or 1):
        problem = (
            f"other processes use {num_gpus - len(free)} of the {num_gpus} visible GPUs. Wait for free GPUs, "
            "use fewer, or list the GPUs to share: devices=[0, …]"
        )
    if problem:
        raise UserError(f"devices is {devices!r}, but {problem}.")
    return list(request if isinstance(request, list) else free[:request])


def find_devices(devices: Devices, environ: Mapping[str, str], *, use_gpus: bool = True) -> list[int | None]:
    num_gpus = torch.cuda.device_count() if use_gpus and torch.cuda.is_available() else 0
    busy: list[int] = []
    if num_gpus:
        with GpuReader(visible_devices(environ)) as reader:
            for index, pids in enumerate(reader.pids):
                # In a container, the driver reports pids of the host, which differ from those inside.
                is_own = os.getpid() in pids or torch.cuda.memory_reserved(index) > 0
                if len(pids) > is_own:
                    busy.append(index)
    return choose_devices(devices, num_gpus, busy)


def has_launcher(ranks: Ranks) -> bool:
    return ranks.environment != "local"


def process_devices(ranks: Ranks, environ: Mapping[str, str]) -> list[int | None]:
    """Return the devices of a rank that a launcher has started with several; empty if it has one."""
    per_task = gpus_per_task(environ)
    if per_task < 2 and ranks.local_world_size > 1:
        return []
    if num_gpus := torch.cuda.device_count() if torch.cuda.is_available() else 0:
        return list(range(num_gpus)) if num_gpus > 1 else []
    return [None] * per_task if per_task > 1 else []


def with_devices(context: DistributedContext, indices: Sequence[int | None]) -> DistributedContext:
    if not indices:
        return context
    device, *extra_devices = (
        torch.device("cpu") if index is None else torch.device("cuda", index) for index in indices
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return replace(context, device=device, extra_devices=tuple(extra_devices))


def describe_hardware(device: torch.device) -> str:
    """Return the model of a device; devices of the same model round equally."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_model() or platform.machine()} with {torch.backends.cpu.get_cpu_capability()}"


def cpu_model() -> str | None:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return None
