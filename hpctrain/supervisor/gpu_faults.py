"""Faults of GPUs that the driver reported while an attempt ran, as a node's measuring has them."""

from __future__ import annotations

import re

from hpctrain.jobs.tail import last_records
from hpctrain.rundir import RunDir

#: Xids that speak of the device, its memory or its links, and not of a kernel (NVIDIA, "XID Errors", the
#: table of what to do: those after which the GPU has to be reset or the node to be looked at).
HARDWARE_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
#: The newest lines of a node's file that can be of one attempt's end.
_LINES = 200

_NUMBER = re.compile(r"\d+")


def gpu_faults(run: RunDir, host: str, since: float) -> list[int]:
    """Numbers of such errors on a node since a moment, in seconds since the epoch."""
    found = []
    for path in run.all_telemetry():
        for _, line in zip(range(_LINES), last_records(path), strict=False):
            if _short(str(line.get("host"))) != _short(host) or float(line.get("time", 0.0)) < since:
                break
            found += [number for number in _numbers(line.get("gpu_xids")) if number in HARDWARE_XIDS]
    return found


def _short(host: str) -> str:
    """A host's name without its domain, which Slurm's name of the node need not have."""
    return host.partition(".")[0]


def _numbers(value: object) -> list[int]:
    return [int(number) for number in _NUMBER.findall(str(value or ""))]
