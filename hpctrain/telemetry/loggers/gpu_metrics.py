"""Read GPU measurements of all nodes as metrics for the loggers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpctrain.crash_output import file_size
from hpctrain.files import parse_json_line, read_new_lines
from hpctrain.rundir import RunDir
from hpctrain.text import is_finite

#: Measurements that are sent, by their field in a telemetry file.
_FIELDS = {
    "gpu_util": "util",
    "gpu_memory": "memory",
    "gpu_power_w": "power_w",
    "gpu_temp_c": "temp_c",
    "gpu_clock_mhz": "clock_mhz",
}
#: With more GPUs, the mean, minimum and maximum over all GPUs are sent.
_MAX_GPUS = 64
#: Seconds by which a measurement may be newer than its step: the longest interval between two of a node.
_TOLERANCE_S = 30.0
#: Age of measurements that count for the mean: the nodes do not measure at the same time.
_RECENT_S = 120.0


class GpuMetrics:
    """The newest measurements of the GPUs of all nodes, read from the telemetry files of a run."""

    def __init__(self, run: RunDir) -> None:
        """Skip the measurements of earlier attempts."""
        self._run = run
        self._offsets = {path: file_size(path) for path in run.all_telemetry()}
        #: The newest measurement of each node: its time, and the values of each GPU.
        self._newest: dict[str, tuple[float, list[dict[str, float]]]] = {}
        self._unsent: set[str] = set()
        self._offered: set[str] = set()
        self._num_gpus = 0

    def read(self) -> None:
        """Read new lines of all nodes."""
        paths = self._run.all_telemetry()
        for path in paths:
            for record in self._new_records(path):
                if gpus := _values_by_gpu(record):
                    self._newest[path.stem] = float(record["time"]), gpus
                    self._unsent.add(path.stem)
        # Nodes that have not reported yet have as many GPUs as the others.
        self._num_gpus = len(paths) * max((len(gpus) for _, gpus in self._newest.values()), default=0)

    def values(self, time: float) -> dict[str, float]:
        """Return the measurements to send with a step that ended at `time`, again until `mark_sent`.

        A newer measurement belongs to a later step.
        """
        nodes = {node for node in self._unsent if self._newest[node][0] <= time + _TOLERANCE_S}
        self._offered = nodes
        if self._num_gpus <= _MAX_GPUS:
            return {
                f"gpu/{node}/{index}/{name}": value
                for node in sorted(nodes)
                for index, values in enumerate(self._newest[node][1])
                for name, value in values.items()
            }
        metrics: dict[str, float] = {}
        recent = [gpus for at, gpus in self._newest.values() if nodes and abs(time - at) <= _RECENT_S]
        for name in _FIELDS.values():
            if numbers := [values[name] for gpus in recent for values in gpus if name in values]:
                metrics[f"gpu/mean/{name}"] = sum(numbers) / len(numbers)
                metrics[f"gpu/min/{name}"], metrics[f"gpu/max/{name}"] = min(numbers), max(numbers)
        return metrics

    def mark_sent(self) -> None:
        """Record that the measurements of the last call of `values` have been sent."""
        self._unsent -= self._offered

    def _new_records(self, path: Path) -> Iterator[Mapping[str, Any]]:
        try:
            text, self._offsets[path] = read_new_lines(path, self._offsets.get(path, 0))
        except OSError:
            return
        for line in text.splitlines():
            record = parse_json_line(line.decode(errors="replace"), path)
            if record is not None and is_finite(record.get("time")):
                yield record


def _values_by_gpu(record: Mapping[str, Any]) -> list[dict[str, float]]:
    """Return the measurements of each GPU in a line of a telemetry file."""
    columns = {name: record[field] for field, name in _FIELDS.items() if isinstance(record.get(field), list)}
    count = max(map(len, columns.values()), default=0)
    return [
        {
            name: float(values[index])
            for name, values in columns.items()
            if index < len(values) and is_finite(values[index])
        }
        for index in range(count)
    ]
