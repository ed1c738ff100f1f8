"""Bind a rank to the CPUs next to its GPU. Data workers inherit the binding."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpctrain.cluster import Ranks, compress_hostlist, expand_hostlist
from hpctrain.cluster.device_plan import gpus_per_task, plan_device
from hpctrain.errors import EnvironmentMismatch, UserError
from hpctrain.rundir import CPU_BINDING_VARIABLE
from hpctrain.telemetry.sampling.nvml import list_bus_ids
from hpctrain.text import is_count

SYSFS = Path("/sys")


def bind_cpus(ranks: Ranks, environ: Mapping[str, str]) -> str | None:
    """Bind all threads of this process. Return a message; None if the binding does not change."""
    if (
        environ.get(CPU_BINDING_VARIABLE) == "none"
        or gpus_per_task(environ) > 1
        or not hasattr(os, "sched_setaffinity")
    ):
        return None
    allowed = frozenset(os.sched_getaffinity(0))
    binding = choose_cpus(ranks, environ, allowed, list_bus_ids(environ), SYSFS)
    if binding is None:
        return None
    # A standby worker already has threads of the libraries that it has imported.
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # The thread has ended.
            os.sched_setaffinity(int(thread), binding[0])
    return binding[1]


def choose_cpus(
    ranks: Ranks, environ: Mapping[str, str], allowed: frozenset[int], bus_ids: Sequence[str], sysfs: Path
) -> tuple[frozenset[int], str] | None:
    """Return the CPUs next to the GPU of a rank, and a message; None if Slurm or the user may choose."""
    num_cpus, threads = _read_count(environ, "SLURM_CPUS_ON_NODE"), _read_count(environ, "OMP_NUM_THREADS")
    # Other jobs may also use the CPUs if Slurm does not confine jobs, so the ranks do not divide the CPUs.
    divides = len(allowed) == num_cpus
    local = [_read_cpus(sysfs / "bus/pci/devices" / bus_id / "local_cpulist") for bus_id in bus_ids]
    try:
        index = plan_device(ranks, environ, len(bus_ids)).index
    except EnvironmentMismatch:  # The script will fail when it selects its device.
        return None
    # Slurm has bound the rank, its data workers may use all CPUs, or it may use several GPUs.
    is_bound, is_alone = len(allowed) < num_cpus, ranks.local_world_size == 1
    if index is None or is_bound or is_alone or 1 < len(bus_ids) != ranks.local_world_size:
        return None
    near = local[index] & allowed
    if divides and len(bus_ids) > 1 and index == ranks.local_rank:
        # All ranks of the node see the same GPUs.
        neighbors = [rank for rank in range(ranks.local_world_size) if local[rank] & allowed == near]
        share = _share(near, neighbors.index(index), len(neighbors), sysfs)
        near = share if len(share) >= threads else near
    if near == allowed or len(near) < max(1, threads):
        return None
    numa = _read_text(sysfs / "bus/pci/devices" / bus_ids[index] / "numa_node")
    place = f" (NUMA node {numa})" if numa.isdecimal() else ""
    return near, f"bound to CPUs {format_cpus(near)}, the CPUs closest to GPU {bus_ids[index]}{place}"


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
