"""The GPUs of this machine, as the driver counts them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpctrain.cluster.devices import visible_devices


def count_gpus(environ: Mapping[str, str]) -> int:
    """The number of GPUs that processes with these variables can use; 0 where there is no driver."""
    return count_visible(installed_gpus(), visible_devices(environ))


def count_visible(installed: Sequence[str], listed: Sequence[str] | None) -> int:
    """How many of the devices in `listed`, where None stands for all, there are before the first that is not.

    Args:
        installed: UUIDs of the GPUs that are there.
        listed: what `visible_devices` read. Whether a part of a GPU is there is not looked at.
    """
    if listed is None:
        return len(installed)
    number = 0
    for entry in listed if installed else ():
        is_there = (
            int(entry) < len(installed)
            if entry.isdecimal()
            else entry.startswith("MIG-") or any(uuid.startswith(entry) for uuid in installed)
        )
        if not is_there:
            break
        number += 1
    return number


def installed_gpus() -> list[str]:
    """UUIDs of the GPUs that this process may open, in the driver's order."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    uuids = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                uuids.append(str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))))
            except pynvml.NVMLError:
                continue  # another job's, fenced off by a cgroup
    finally:
        pynvml.nvmlShutdown()
    return uuids


@dataclass(frozen=True)
class DriverFacts:
    """What the driver of this machine says of itself and of its GPUs."""

    version: str | None = None
    """None where there is no driver."""
    cuda: str | None = None
    """The newest CUDA that it knows."""
    names: list[str] = field(default_factory=list)
    """The GPUs that this process may open, in the driver's order."""


def driver_facts() -> DriverFacts:
    """What the driver says; a driver that hangs hangs its caller, too."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return DriverFacts()
    names = []
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                names.append(str(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(index))))
            except pynvml.NVMLError:
                continue  # another job's, fenced off by a cgroup
        # An integer such as 12040 (nvmlSystemGetCudaDriverVersion).
        return DriverFacts(
            str(pynvml.nvmlSystemGetDriverVersion()), f"{cuda // 1000}.{cuda % 1000 // 10}", names
        )
    finally:
        pynvml.nvmlShutdown()
