"""List the AMD GPUs of this machine, and apply the variables that hide some of them.

ROCR_VISIBLE_DEVICES, which Slurm sets, selects GPUs by number or UUID. HIP_VISIBLE_DEVICES selects among
these and renumbers them. CUDA_VISIBLE_DEVICES has the same meaning, if HIP_VISIBLE_DEVICES is not set (ROCm,
"GPU isolation techniques").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import EnvironmentMismatch
from hpctrain.text import is_count, pluralize

ROCR_VARIABLE = "ROCR_VISIBLE_DEVICES"
#: The first of these that is set counts.
HIP_VARIABLES = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")


@dataclass(frozen=True)
class AmdGpu:
    bus_id: str
    """PCI address, as in `0000:3b:00.0`."""
    uuid: str


def list_amd_gpus(topology: Path = _TOPOLOGY) -> list[AmdGpu]:
    """Return the AMD GPUs that this process may open, in the order of the driver."""
    gpus = []
    for folder in sorted(topology.glob("[0-9]*"), key=lambda path: int(path.name)):
        with suppress(OSError, ValueError, KeyError):  # GPUs of other jobs cannot be read.
            fields = (folder / "properties").read_text(encoding="ascii").split()
            facts = dict(zip(fields[::2], map(int, fields[1::2]), strict=False))
            if facts["simd_count"]:  # 0 for CPUs
                place = facts["location_id"]
                bus, slot = f"{place >> 8:02x}", f"{place >> 3 & 31:02x}.{place & 7}"
                uuid = f"GPU-{facts.get('unique_id', 0):016x}"
                gpus.append(AmdGpu(f"{facts.get('domain', 0):04x}:{bus}:{slot}", uuid))
    return gpus


def visible_amd_gpus(environ: Mapping[str, str], gpus: Sequence[AmdGpu]) -> list[AmdGpu]:
    """Return the GPUs that a program with these variables sees, in the order of `cuda:N`."""
    hip = next((name for name in HIP_VARIABLES if name in environ), HIP_VARIABLES[0])
    return _select(environ.get(hip), _select(environ.get(ROCR_VARIABLE), gpus))


def check_amd_variables(environ: Mapping[str, str]) -> None:
    """Check that the variables do not contradict each other."""
    selections = {name: environ[name] for name in HIP_VARIABLES if name in environ}
    if len({text.replace(" ", "") for text in selections.values()}) > 1:
        settings = " and ".join(f"{name}={text}" for name, text in selections.items())
        raise EnvironmentMismatch(
            f"{settings} differ, although both select the GPUs of a ROCm program. Unset one of them."
        )
    rocr = environ.get(ROCR_VARIABLE)
    if not rocr or not selections:
        return
    count = len(rocr.split(","))
    name, text = next(iter(selections.items()))
    if any(is_count(entry.strip()) and int(entry) >= count for entry in text.split(",")):
        raise EnvironmentMismatch(
            f"{ROCR_VARIABLE}={rocr} makes {pluralize(count, 'GPU')} visible, numbered from 0, but "
            f"{name}={text} selects a number above {count - 1}, so the process may see no GPU. Unset "
            f"{name}. If Slurm sets both variables, ask the administrator to set AutoDetect=rsmi or "
            "Flags=amd_gpu_env in gres.conf."
        )


def _select(text: str | None, gpus: Sequence[AmdGpu]) -> list[AmdGpu]:
    """Return the listed GPUs, up to the first invalid entry; all without a list."""
    if text is None:
        return list(gpus)
    selected: list[AmdGpu] = []
    for entry in map(str.strip, text.split(",")):
        if is_count(entry) and int(entry) < len(gpus):
            selected.append(gpus[int(entry)])
        elif matching := [gpu for gpu in gpus if gpu.uuid.lower() == entry.lower()]:
            selected.append(matching[0])
        else:
            break
    return selected
