"""Find GPU faults that the driver reported as Xids."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from hpctrain.record_types import NodeSample
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir
from hpctrain.text import short_name

#: Xids of the device, its memory or its links, not of a kernel: they require a reset of the GPU or an
#: inspection of the node (NVIDIA, "XID Errors", the table of actions).
HARDWARE_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
#: Number of newest lines of a node's file to search after an attempt.
_LINES = 200


def gpu_faults(run: RunDir, hosts: Iterable[str], since: float) -> dict[str, list[int]]:
    """Return the Xids that the devices of each node reported since a time, in seconds since the epoch."""
    names = {short_name(host): host for host in hosts}
    faults: dict[str, list[int]] = {}
    for path in run.all_telemetry():
        for sample in islice(read_last_records(path, NodeSample), _LINES):
            host = names.get(short_name(sample.host))
            if host is None or sample.time < since:
                break
            if xids := HARDWARE_XIDS.intersection(chain.from_iterable(sample.gpu_xids)):
                faults.setdefault(host, []).extend(xids)
    return faults
