"""Read and write the variables that choose the GPUs that a process sees."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hpctrain.cluster.amd_gpus import HIP_VARIABLES, list_amd_gpus

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ORDINAL = re.compile(r"\s*(\d{1,18})(?!\d)")


def visible_devices(environ: Mapping[str, str]) -> list[str] | None:
    """Return the entries of CUDA_VISIBLE_DEVICES that CUDA uses; None if all GPUs are visible.

    CUDA reads numbers or UUIDs, stops at the first entry that is neither, and treats a list with duplicates
    as empty (CUDA C++ Programming Guide, "CUDA Environment Variables"). Slurm writes NoDevFiles if a job has
    no GPU.
    """
    text = environ.get(VISIBLE_VARIABLE)
    if text is None:
        return None
    entries: dict[str, None] = {}
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
        entries[entry] = None
    return list(entries)


def is_mig(environ: Mapping[str, str]) -> bool:
    """True if MIG instances are visible instead of GPUs."""
    return (visible_devices(environ) or [""])[0].startswith("MIG-")


def gpu_variables(gpus: Sequence[str]) -> dict[str, str]:
    """Return variables that restrict a process to these of the visible GPUs."""
    names = HIP_VARIABLES if list_amd_gpus() else (VISIBLE_VARIABLE,)
    return dict.fromkeys(names, ",".join(gpus)) if gpus else {}
