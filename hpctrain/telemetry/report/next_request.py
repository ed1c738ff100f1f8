"""Resources to request for the next run of this kind, from what a completed run used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.slurm.duration import format_time_limit
from hpctrain.slurm.parsing import parse_size_mib
from hpctrain.telemetry.accounting.time_spans import TimeCategory
from hpctrain.telemetry.report.device_metrics import COLUMNS, NO_VALUE, DeviceMetrics
from hpctrain.telemetry.report.run_data import RunData
from hpctrain.text import format_duration, format_memory, format_number, is_finite

#: Margin for a run that needs more than this one.
_MARGIN = 1.25
#: Time limits are multiples of this number of seconds.
_TIME_UNIT_S = 300
#: A request that is at most this fraction larger than needed is left unchanged.
_TOLERANCE = 0.2
#: Utilisation in per cent that an idle GPU does not exceed.
_IDLE_GPU = 1.0
#: Fraction of the time waiting for data above which a run needs all its CPUs.
_WAITS_FOR_DATA = 0.1


@dataclass(frozen=True)
class ResourceRequest:
    """An option of `submit`, with the value to use next time."""

    option: str
    requested: str
    used: str
    next: str

    def __str__(self) -> str:
        return f"{self.option}={self.next} (used {self.used} of {self.requested})"


def next_request(run_data: RunData) -> list[ResourceRequest]:
    """Return the options whose values were too large, or a time limit that needed several jobs.

    Node measurements include other jobs on the same nodes, so they are upper bounds of the need. The local
    backend reserves nothing.
    """
    if run_data.state != "COMPLETED" or run_data.spec.get("backend") == "local":
        return []
    return [*_time(run_data), *_memory(run_data), *_cpus(run_data), *_gpus(run_data)]


def _time(run_data: RunData) -> Iterator[ResourceRequest]:
    limit_s, totals = run_data.spec.get("time_limit_s"), run_data.breakdown.totals_us
    used_s = (run_data.breakdown.wall_us - totals[TimeCategory.QUEUED] - totals[TimeCategory.IDLE]) / 1e6
    lead_s = run_data.spec.get("stop_before_limit_s")
    if not is_finite(limit_s) or not used_s:
        return
    needed_s = _MARGIN * used_s + (lead_s if is_finite(lead_s) else 0)
    needed_s = _TIME_UNIT_S * math.ceil(needed_s / _TIME_UNIT_S)
    limits = [event.get("max_time_s") for event in run_data.events if event.get("kind") == "submitted"]
    if limits and is_finite(limits[-1]):
        needed_s = min(needed_s, limits[-1])
    if needed_s == limit_s:
        return
    if limit_s < used_s or needed_s < limit_s * (1 - _TOLERANCE):
        yield ResourceRequest(
            "--time", format_time_limit(limit_s), format_duration(used_s), format_time_limit(needed_s)
        )


def _memory(run_data: RunData) -> Iterator[ResourceRequest]:
    directives = run_data.spec.get("directives")
    text = str(directives.get("mem") or "") if isinstance(directives, dict) else ""
    used = max((node.highest_memory or 0 for node in run_data.devices.nodes), default=0)
    requested_mib = parse_size_mib(text)
    ran_out = any(event.get("class") == "oom" for event in run_data.events)
    if not used or not requested_mib or ran_out:
        return
    needed_gib = math.ceil(_MARGIN * used / 2**30)
    if needed_gib * 1024 < requested_mib * (1 - _TOLERANCE):
        yield ResourceRequest("--mem", text, format_memory(used), f"{needed_gib}G")


def _cpus(run_data: RunData) -> Iterator[ResourceRequest]:
    spec, devices = run_data.spec, run_data.devices
    requested, ranks = spec.get("cpus_per_task"), spec.get("ntasks_per_node") or spec.get("gpus_per_node")
    waiting_us = run_data.breakdown.totals_us[TimeCategory.DATA]
    waits = waiting_us > _WAITS_FOR_DATA * run_data.breakdown.wall_us
    if not is_finite(requested) or not is_finite(ranks) or not ranks or waits:
        return
    nodes = zip(_peaks(devices, "cpu"), devices.nodes, strict=False)
    busy = max((peak / 100 * (node.cpus or 0) for peak, node in nodes), default=0.0)
    needed = max(1, math.ceil(_MARGIN * busy / ranks))
    if busy and needed < requested * (1 - _TOLERANCE):
        used = f"{format_number(round(busy / ranks, 1))} busy per rank"
        yield ResourceRequest("--cpus-per-task", str(requested), used, str(needed))


def _gpus(run_data: RunData) -> Iterator[ResourceRequest]:
    requested, peaks = run_data.spec.get("gpus_per_node"), _peaks(run_data.devices, "gpu_util")
    if not is_finite(requested) or not requested or not peaks:
        return
    hosts = [row.rpartition(" · ")[0] for row in run_data.devices.rows]
    busy = [host for host, peak in zip(hosts, peaks, strict=False) if peak > _IDLE_GPU]
    used = max(map(busy.count, busy), default=0)
    if used < requested:
        yield ResourceRequest("--gpus-per-node", str(requested), f"{used} busy", str(used))


def _peaks(devices: DeviceMetrics, name: str) -> list[float]:
    """Return the highest interval of each GPU or node, in the unit of the quantity; empty if not measured."""
    for each in (*devices.maps, *devices.node_maps):
        if each.quantity.field == name:
            cells = each.cells.replace(bytes([NO_VALUE]), bytes(1))
            return [max(cells[at : at + COLUMNS]) * each.most / 254 for at in range(0, len(cells), COLUMNS)]
    return []
