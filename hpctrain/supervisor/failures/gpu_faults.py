"""GPU faults that the driver reported during an attempt, read from the nodes' telemetry."""

from __future__ import annotations

import re

from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir

#: Xids of the device, its memory or its links, not of a kernel: those after which the GPU must be reset or
#: the node inspected (NVIDIA, "XID Errors", the table of actions).
HARDWARE_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
#: Newest lines of a node's file that are searched for the end of one attempt.
_LINES = 200

_NUMBER = re.compile(r"\d+")


def gpu_faults(run: RunDir, host: str, since: float) -> list[int]:
    """Return such Xids on a node since a time, in seconds since the epoch."""
    found = []
    for path in run.all_telemetry():
        for _, line in zip(range(_LINES), read_last_records(path), strict=False):
            if _short(str(line.get("host"))) != _short(host) or float(line.get("time", 0.0)) < since:
                break
            found += [number for number in _numbers(line.get("gpu_xids")) if number in HARDWARE_XIDS]
    return found


def _short(host: str) -> str:
    """Return a host's name without its domain, which Slurm's node name may lack."""
    return host.partition(".")[0]


def _numbers(value: object) -> list[int]:
    return [int(number) for number in _NUMBER.findall(str(value or ""))]
