"""Checks of this machine: CPUs, memory, GPUs, and the installed torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.cluster.amd_gpus import HIP_VARIABLES, ROCR_VARIABLE, list_amd_gpus
from hpctrain.jobs.doctor.finding import Finding
from hpctrain.jobs.doctor.probe_command import ProbeFailed, run_python_probe
from hpctrain.text import format_memory, pluralize

_TOPIC = "This machine"
#: The first import of torch from a file server is slow.
_TORCH_LIMIT_S = 120.0
_DRIVER_LIMIT_S = 20.0
#: Data workers pass batches in shared memory.
_LITTLE_SHARED_BYTES = 1 << 30

_DRIVER_CODE = """
import json
from dataclasses import asdict
from hpctrain.telemetry.sampling.nvml import read_driver_facts
print(json.dumps(asdict(read_driver_facts())))
"""

# In a separate process: torch takes seconds to import, and may hang or crash.
_TORCH_CODE = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch
    import torch.distributed as dist
    usable = torch.cuda.is_available()
has_nccl = dist.is_available() and dist.is_nccl_available()
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "rocm": torch.version.hip,
    "usable": usable,
    "num_gpus": torch.cuda.device_count() if usable else 0,
    "warning": next((str(one.message).splitlines()[0] for one in caught if "CUDA" in str(one.message)), ""),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
    "gloo": dist.is_available() and dist.is_gloo_available(),
}))
"""


def check_machine() -> list[Finding]:
    """Return findings on CPUs and memory."""
    usable, all_cpus = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    cpus = str(all_cpus) if usable == all_cpus else f"{usable} of {all_cpus} usable by this process"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    findings = [Finding(_TOPIC, "CPUs", cpus), Finding(_TOPIC, "memory", format_memory(total))]
    return findings + list(_shared_memory(Path("/dev/shm")))


def check_gpus(environ: Mapping[str, str]) -> tuple[list[Finding], int]:
    """Return findings on the GPUs that the driver reports, and their number."""
    try:
        facts = run_python_probe(["-c", _DRIVER_CODE], environ, _DRIVER_LIMIT_S)
    except ProbeFailed as error:
        words = f"the driver does not respond: {error}"
        return [Finding(_TOPIC, "GPUs", words, "problem", "Check the output of nvidia-smi.")], 0
    names: list[str] = facts["names"]
    if not names and (amd := list_amd_gpus()):
        return [Finding(_TOPIC, "GPUs", f"{len(amd)} × AMD"), *_visible(environ)], 0
    if not names:
        words = "none" if facts["version"] is None else "none usable by this process"
        return [Finding(_TOPIC, "GPUs", words)], 0
    kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
    findings = [
        Finding(_TOPIC, "GPUs", kinds),
        Finding(_TOPIC, "driver", f"{facts['version']}, supports CUDA up to {facts['cuda']}"),
    ]
    return findings + _visible(environ), len(names)


def _visible(environ: Mapping[str, str]) -> list[Finding]:
    return [
        Finding(_TOPIC, name, f"{environ[name]} (your environment)")
        for name in (ROCR_VARIABLE, *HIP_VARIABLES)
        if environ.get(name)
    ]


def query_torch(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return facts about torch, from the environment that runs would use.

    Raises:
        ProbeFailed: it cannot be imported.
    """
    return run_python_probe(["-c", _TORCH_CODE], environ, _TORCH_LIMIT_S)


def torch_findings(
    facts: Mapping[str, Any] | ProbeFailed, *, gpus_here: int, gpus_of_site: int
) -> list[Finding]:
    """Return findings on torch, given the GPUs that it could use."""
    if isinstance(facts, ProbeFailed):
        return [
            Finding(
                _TOPIC,
                "torch",
                f"cannot be imported: {facts}",
                "problem",
                "No rank can start. Repair the Python environment in which hpctrain is installed.",
            )
        ]
    return [_torch(facts, gpus_here, gpus_of_site), *_backends(facts)]


def _shared_memory(place: Path) -> Iterator[Finding]:
    try:
        stat = os.statvfs(place)
    except OSError:
        return
    size = stat.f_blocks * stat.f_frsize
    little = size < _LITTLE_SHARED_BYTES
    yield Finding(
        _TOPIC,
        "shared memory",
        f"{format_memory(size)} ({place})",
        "note" if little else "ok",
        "Data loader workers may crash (bus error). Increase the shared memory of the container, for example "
        "with --shm-size."
        if little
        else "",
    )


def _torch(facts: Mapping[str, Any], gpus_here: int, gpus_of_site: int) -> Finding:
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['rocm']}" if facts["rocm"] else "CPUs"
    value = f"{facts['version']}, built for {build}"
    if facts["usable"]:
        return Finding(
            _TOPIC, "torch", f"{value}, can use {pluralize(facts['num_gpus'], 'GPU')} on this machine"
        )
    if gpus_here:
        why = f": {facts['warning']}" if facts["warning"] else ""
        return Finding(
            _TOPIC,
            "torch",
            f"{value}, cannot use the GPUs on this machine{why}",
            "problem",
            "Install a torch build for a CUDA version that this driver supports.",
        )
    if gpus_of_site and build == "CPUs":
        return Finding(
            _TOPIC,
            "torch",
            value,
            "note",
            "Ranks cannot use the GPUs at this site. Install a torch build with GPU support.",
        )
    return Finding(_TOPIC, "torch", value)


def _backends(facts: Mapping[str, Any]) -> Iterator[Finding]:
    if facts["nccl"]:
        yield Finding(_TOPIC, "NCCL", facts["nccl"])
    else:
        yield Finding(_TOPIC, "NCCL", "not in this torch build; required only by ranks on GPUs")
    if facts["gloo"]:
        yield Finding(_TOPIC, "gloo", "available")
    else:
        yield Finding(
            _TOPIC,
            "gloo",
            "not in this torch build",
            "problem",
            "Ranks on CPUs require gloo. Install a torch build that includes it.",
        )
