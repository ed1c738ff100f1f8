"""Check this machine: runs folder, shared memory, GPUs, containers, network, and the installed torch.

`python -m hpctrain.jobs.doctor.machine_checks FOLDER` probes a runs folder and prints JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hpctrain.cluster.addresses import interfaces, is_loopback, resolve_host
from hpctrain.cluster.amd_gpus import list_amd_gpus
from hpctrain.files import is_locked, try_lock
from hpctrain.jobs.backends.mounts import find_mount, is_node_local
from hpctrain.jobs.doctor.probe import Finding, ProbeFailed, run_python_probe
from hpctrain.slurm.site_facts import has_pyxis
from hpctrain.text import format_memory, format_size, pluralize

#: The first import of torch from a file server is slow.
_TORCH_LIMIT_S = 120.0
_DRIVER_LIMIT_S = _FOLDER_LIMIT_S = 20.0
#: With less space, a checkpoint of a medium-sized model fills the file system.
_LITTLE_BYTES = 10 << 30
#: Data workers pass batches in shared memory.
_LITTLE_SHARED_BYTES = 1 << 30
_CONTAINER_PROGRAMS = ("apptainer", "singularity", "enroot")

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
messages = [str(warning.message).splitlines()[0] for warning in caught]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "rocm": torch.version.hip,
    "usable": usable,
    "num_gpus": torch.cuda.device_count() if usable else 0,
    "warning": next((message for message in messages if "CUDA" in message), ""),
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
    "gloo": dist.is_available() and dist.is_gloo_available(),
}))
"""
_machine = partial(Finding, "This machine")
_network = partial(Finding, "Network")
_containers = partial(Finding, "Containers")
_folder = partial(Finding, "Runs folder")


def check_machine() -> Iterator[Finding]:
    yield _machine("CPUs", str(len(os.sched_getaffinity(0))))
    yield _machine("memory", format_memory(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
    try:
        stat = os.statvfs("/dev/shm")
    except OSError:
        return
    size = stat.f_blocks * stat.f_frsize
    remedy = (
        "Data loader workers may crash (bus error). Increase the shared memory of the container, for example "
        "with --shm-size."
    )
    value = f"{format_memory(size)} (/dev/shm)"
    yield _machine("shared memory", value, remedy if size < _LITTLE_SHARED_BYTES else "")


def check_gpus(environ: Mapping[str, str]) -> tuple[list[Finding], int]:
    """Return findings on the GPUs that the driver reports, and the number of NVIDIA GPUs."""
    try:
        facts = run_python_probe(["-c", _DRIVER_CODE], environ, _DRIVER_LIMIT_S)
    except ProbeFailed as error:
        value = f"the driver does not respond: {error}"
        return [_machine("GPUs", value, "Check the output of nvidia-smi.", "problem")], 0
    if names := facts["names"]:
        kinds = ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))
        driver = f"{facts['version']}, supports CUDA up to {facts['cuda']}"
        return [_machine("GPUs", kinds), _machine("driver", driver)], len(names)
    if amd_gpus := list_amd_gpus():
        return [_machine("GPUs", f"{len(amd_gpus)} × AMD")], 0
    return [_machine("GPUs", "none" if facts["version"] is None else "none usable by this process")], 0


def query_torch(environ: Mapping[str, str]) -> dict[str, Any] | ProbeFailed:
    """Return facts about torch, from the environment that runs would use, or the error of its import."""
    try:
        return run_python_probe(["-c", _TORCH_CODE], environ, _TORCH_LIMIT_S)
    except ProbeFailed as error:
        return error


def torch_findings(
    facts: Mapping[str, Any] | ProbeFailed, *, gpus_here: int, gpus_of_site: int
) -> Iterator[Finding]:
    if isinstance(facts, ProbeFailed):
        remedy = "No rank can start. Repair the Python environment in which hpctrain is installed."
        yield _machine("torch", f"cannot be imported: {facts}", remedy, "problem")
        return
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['rocm']}" if facts["rocm"] else "CPUs"
    value = f"{facts['version']}, built for {build}"
    if facts["usable"]:
        yield _machine("torch", f"{value}, can use {pluralize(facts['num_gpus'], 'GPU')} on this machine")
    elif gpus_here:
        reason = f": {facts['warning']}" if facts["warning"] else ""
        value += f", cannot use the GPUs on this machine{reason}"
        remedy = "Install a torch build for a CUDA version that this driver supports."
        yield _machine("torch", value, remedy, "problem")
    else:
        remedy = "Ranks cannot use the GPUs at this site. Install a torch build with GPU support."
        yield _machine("torch", value, remedy if gpus_of_site and build == "CPUs" else "")
    yield _machine("NCCL", facts["nccl"] or "not in this torch build; required only by ranks on GPUs")
    remedy = "Ranks on CPUs require gloo. Install a torch build that includes it."
    gloo = ("available",) if facts["gloo"] else ("not in this torch build", remedy, "problem")
    yield _machine("gloo", *gloo)


def check_containers(environ: Mapping[str, str]) -> tuple[list[Finding], tuple[str, ...]]:
    """Return findings on containers, and the names of the available runtimes."""
    runtimes = {"pyxis": "srun supports --container-image"} if has_pyxis(environ) else {}
    for program in _CONTAINER_PROGRAMS:
        if (path := shutil.which(program, path=environ.get("PATH"))) is not None:
            runtimes[program] = path
    findings = [_containers(name, value) for name, value in runtimes.items()]
    if not findings:
        value = "pyxis, apptainer, singularity and enroot were not found on this machine"
        findings = [_containers("none", value)]
    if "enroot" in runtimes and "pyxis" not in runtimes:
        remedy = "enroot alone cannot start ranks. Ask the administrator to install pyxis, or use apptainer."
        findings.append(_containers("pyxis", "srun does not support --container-image", remedy))
    return findings, tuple(runtimes)


def check_network() -> Iterator[Finding]:
    """Yield findings on this machine's name and interfaces, which ranks on several machines use."""
    host = socket.gethostname()
    try:
        addresses = resolve_host(host)
    except OSError as error:
        remedy = (
            "Ranks use the addresses in Slurm's configuration instead. Ask the administrator to add the name "
            "to /etc/hosts or DNS."
        )
        yield _network("host name", f"{host} does not resolve: {error}", remedy)
    else:
        remedy = (
            "Ranks on other machines could not connect to gloo at this address, so runs set "
            "GLOO_SOCKET_IFNAME to the right interface."
        )
        is_local = all(map(is_loopback, addresses))
        yield _network("host name", f"{host} resolves to {', '.join(addresses)}", remedy if is_local else "")
    usable: dict[str, list[str]] = {}
    for name, address in interfaces():
        if not is_loopback(address.partition("%")[0]) and not address.startswith("fe80:"):
            usable.setdefault(name, [name]).append(address)
    value = ", ".join(map(" ".join, usable.values())) or "loopback only"
    yield _network("interfaces", value, "" if usable else "Runs on several nodes will not work.")


def check_runs_folder(folder: Path, environ: Mapping[str, str], *, other_machines: bool) -> list[Finding]:
    """Return findings on the runs folder, from a process that an unresponsive file server may block."""
    try:
        facts = run_python_probe(["-m", __name__, str(folder)], environ, _FOLDER_LIMIT_S)
    except ProbeFailed as error:
        remedy = "Check the file system, or use another --run-dir."
        return [_folder("check", f"failed: {error}", remedy, "problem")]
    return list(_folder_findings(facts, other_machines=other_machines))


def _folder_findings(facts: Mapping[str, Any], *, other_machines: bool) -> Iterator[Finding]:
    place = f"{facts['folder']}: {facts['mount']}"
    if not other_machines or facts["is_shared"]:
        yield _folder("file system", place)
    elif facts["per_node"]:
        remedy = (
            "This folder is local to each node. Submit from a folder that all nodes share, or use --run-dir."
        )
        yield _folder("file system", place, remedy, "problem")
    else:
        yield _folder(
            "file system",
            place,
            "This folder appears to be on a local disk. Unless the nodes mount this disk under the same "
            "path, set --run-dir to a folder that all nodes share.",
        )
    remedy = "Checkpoints usually need more space. Delete files, or choose another --run-dir."
    free = facts["free_bytes"]
    yield _folder("free space", format_size(free), remedy if free < _LITTLE_BYTES else "")
    if trouble := facts.get("write"):
        remedy = "Submit from a folder that you can write to, or use --run-dir."
        yield _folder("writing", f"not possible: {trouble}", remedy, "problem")
    elif trouble := facts["locking"]:
        remedy = (
            "Use another file system for runs (--run-dir). On this file system, two submissions could use "
            "the same run folder at the same time."
        )
        yield _folder("locking", trouble, remedy, "problem")
    else:
        yield _folder("locking", "works")


def probe_folder(folder: Path) -> dict[str, object]:
    """Return facts about the file system of `folder`, or of its nearest existing parent."""
    while not folder.exists():
        folder = folder.parent
    mount, stat = find_mount(folder), os.statvfs(folder)
    facts: dict[str, object] = {
        "folder": str(folder),
        "mount": f"{mount.type} ({mount.source} on {mount.point})" if mount else "unknown",
        "is_shared": mount is not None and mount.is_shared,
        "per_node": is_node_local(folder),
        "free_bytes": stat.f_bavail * stat.f_frsize,
    }
    try:
        with tempfile.TemporaryDirectory(prefix=".hpctrain-doctor-", dir=folder) as temporary:
            facts["locking"] = _probe_lock(Path(temporary, "lock"))
    except OSError as error:
        facts["write"] = error.strerror or str(error)
    return facts


def _probe_lock(path: Path) -> str:
    """Return the problem with locks; empty if there is none."""
    try:
        if (lock := try_lock(path)) is None:
            return "a new lock file is already locked"
        is_held = is_locked(path) and try_lock(path) is None
        os.close(lock)
        if not is_held:
            return "two processes can hold the same lock"
        return "a lock remains after it is released" if is_locked(path) else ""
    except OSError as error:
        return error.strerror or str(error)


def main() -> None:
    # The default handler would not remove the temporary folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(json.dumps(probe_folder(Path(sys.argv[1]))))


if __name__ == "__main__":
    main()
