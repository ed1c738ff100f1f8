"""Bind a rank to the CPUs next to its GPU. Data workers inherit the binding."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hpctrain.cluster import Ranks, compress_hostlist, expand_hostlist
from hpctrain.cluster.device_plan import gpus_per_task, plan_device
from hpctrain.errors import EnvironmentMismatch, UserError
from hpctrain.rundir import CPU_BINDING_VARIABLE
from hpctrain.telemetry.sampling.nvml import list_bus_ids
from hpctrain.text import is_count

SYSFS = Path("/sys")


class CpuBinding(NamedTuple):
    cpus: frozenset[int]
    message: str


def bind_cpus(ranks: Ranks, environ: Mapping[str, str]) -> CpuBinding | None:
    """Bind all threads of this process; None if the binding does not change, or the rank has several GPUs."""
    if (
        environ.get(CPU_BINDING_VARIABLE) == "none"
        or gpus_per_task(environ) > 1
        or not hasattr(os, "sched_setaffinity")
    ):
        return None
    allowed = frozenset(os.sched_getaffinity(0))
    binding = choose_cpus(ranks, environ, allowed, list_bus_ids(environ), SYSFS)
    if binding is not None and binding.cpus != allowed:
        # A standby worker already has threads of the libraries that it has imported.
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):  # The thread has ended.
                os.sched_setaffinity(int(thread), binding.cpus)
    return binding


def choose_cpus(
    ranks: Ranks, environ: Mapping[str, str], allowed: frozenset[int], bus_ids: Sequence[str], sysfs: Path
) -> CpuBinding | None:
    num_cpus, threads = _read_count(environ, "SLURM_CPUS_ON_NODE"), _read_count(environ, "OMP_NUM_THREADS")
    # Other jobs may also use the CPUs if Slurm does not confine jobs, so the ranks do not divide the CPUs.
    divides = len(allowed) == num_cpus
    local = [_read_cpus(sysfs / "bus/pci/devices" / bus_id / "local_cpulist") for bus_id in bus_ids]
    try:
        index = plan_device(ranks, environ, len(bus_ids)).index
    except EnvironmentMismatch:  # The script will fail when it selects its device.
        return None
    if index is None:
        return None
    gpu, near = f"GPU {bus_ids[index]}", local[index] & allowed
    if len(allowed) < num_cpus:
        if near or not local[index]:
            return None
        return CpuBinding(
            allowed,
            f"Slurm bound this rank to CPUs {format_cpus(allowed)}, but its {gpu} is closest to CPUs "
            f"{format_cpus(local[index])}. Submit with --sbatch gres-flags=enforce-binding.",
        )
    if ranks.local_world_size == 1 or 1 < len(bus_ids) != ranks.local_world_size:
        return None  # Its data workers may use all CPUs, or it may use several GPUs.
    if divides and len(bus_ids) > 1 and index == ranks.local_rank:
        # All ranks of the node see the same GPUs.
        neighbors = [rank for rank in range(ranks.local_world_size) if local[rank] & allowed == near]
        share = _share(near, neighbors.index(index), len(neighbors), sysfs)
        near = share if len(share) >= threads else near
    if near == allowed or len(near) < max(1, threads):
        return None
    numa = _read_text(sysfs / "bus/pci/devices" / bus_ids[index] / "numa_node")
    place = f" (NUMA node {numa})" if numa.isdecimal() else ""
    return CpuBinding(near, f"bound to CPUs {format_cpus(near)}, the CPUs closest to {gpu}{place}")


def _share(cpus: frozenset[int], index: int, count: int, sysfs: Path) -> frozenset[int]:
    """Return an equal share of the cores: hyperthreads of a core stay together."""
    siblings = "devices/system/cpu/cpu{}/topology/thread_siblings_list"
    threads = {_read_cpus(sysfs / siblings.format(cpu)) & cpus or frozenset({cpu}) for cpu in cpus}
    cores = sorted(threads, key=min)
    return frozenset().union(*cores[index * len(cores) // count : (index + 1) * len(cores) // count])


def format_cpus(cpus: Iterable[int]) -> str:
    """Return CPUs in the notation of Linux, such as `0-3,8`."""
    return compress_hostlist(map(str, sorted(cpus))).strip("[]")


def _read_cpus(path: Path) -> frozenset[int]:
    """Return the CPUs in a file such as `local_cpulist`; empty if it cannot be read."""
    with suppress(UserError, ValueError):
        return frozenset(map(int, expand_hostlist(f"[{_read_text(path)}]")))
    return frozenset()


def _read_text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(encoding="ascii", errors="replace").strip()
    return ""


def _read_count(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    return int(text) if is_count(text) else 0
