"""The process that measures a node: one a node, beside the ranks and not in one of them.

    python -m hpctrain.telemetry.sampler RUN NODE

writes `telemetry/node-NNN.jsonl` of the run until its standard input closes or gets a line, so it ends with
whoever started it, however that ends. Signals that tell ranks to save reach it too, and mean nothing to it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hpctrain.cluster.devices import visible_devices
from hpctrain.cluster.hosts import host_name
from hpctrain.files import append_json_line
from hpctrain.rundir import RunDir
from hpctrain.telemetry.gpu_reading import GpuReading
from hpctrain.telemetry.gpus import GpuReader
from hpctrain.telemetry.node import NodeReader

#: Seconds between two readings.
READ_EVERY_S = 1.0
#: Seconds that a line sums up: few while somebody may be looking, more in a run that goes on for days.
FIRST_LINE_S, LATER_LINE_S, FIRST_LINES_FOR_S = 5.0, 30.0, 600.0

#: How the readings of a stretch become one value; of the others, the last one counts.
_MEANS = frozenset({"util", "power_w", "clock_mhz"})
_HIGHEST = frozenset({"memory", "temp_c"})
#: Everything that was told in the stretch.
_ALL = frozenset({"throttled", "xids"})
#: Counters since the driver was loaded, which become bytes a second.
_COUNTERS = frozenset({"nvlink_rx", "nvlink_tx"})


class Sampler:
    """Measures a node and writes lines about it."""

    def __init__(
        self,
        path: Path,
        gpus: GpuReader,
        node: NodeReader,
        *,
        host: str,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Begin to measure.

        Args:
            path: the file.
            gpus: an open reader.
            node: reads the rest.
            host: the node's name.
            clock: seconds that only go forward.
            now: seconds since the epoch.
        """
        self._path, self._gpus, self._node, self._host = path, gpus, node, host
        self._clock, self._now = clock, now
        self._started = self._line_began = clock()
        self._readings: list[list[GpuReading]] = []
        self._counted: list[GpuReading] = []

    def begin(self) -> None:
        """Write what the node is."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write(
            {
                "gpu_names": self._gpus.names,
                "gpu_memory_total": self._gpus.memory_bytes,
                "cpus": self._node.num_cpus,
                "memory_total": self._node.memory_bytes,
            }
        )
        self._counted = self._gpus.read(traffic=True)

    def read(self) -> None:
        """Read once, and write a line where it is time for one."""
        line_is_due = self._clock() - self._line_began >= self._line_s
        self._readings.append(self._gpus.read(traffic=line_is_due))
        if line_is_due:
            self.flush()

    def flush(self) -> None:
        """Write a line about what was read since the last one."""
        if not self._readings:
            return
        seconds = self._clock() - self._line_began
        line: dict[str, Any] = {"seconds": round(seconds, 3)}
        if any(self._readings):
            line |= _summed_up(self._readings, self._counted, seconds)
        line |= {
            name: round(value, 1) if isinstance(value, float) else value
            for name, value in vars(self._node.read()).items()
            if value is not None
        }
        self._write(line)
        self._counted, self._readings, self._line_began = self._readings[-1], [], self._clock()

    @property
    def _line_s(self) -> float:
        is_early = self._clock() - self._started < FIRST_LINES_FOR_S
        return FIRST_LINE_S if is_early else LATER_LINE_S

    def _write(self, line: Mapping[str, Any]) -> None:
        append_json_line(self._path, {"time": self._now(), "host": self._host, **line})


def _summed_up(
    readings: Sequence[Sequence[GpuReading]], before: Sequence[GpuReading], seconds: float
) -> dict[str, list[Any]]:
    """A list with a value for each GPU, for everything that some GPU tells."""
    line: dict[str, list[Any]] = {}
    each_gpu = list(zip(*readings, strict=False))
    for name in (each.name for each in fields(GpuReading)):
        values = []
        for number, gpu in enumerate(each_gpu):
            known = [value for reading in gpu if (value := getattr(reading, name)) is not None]
            values.append(_one_of(name, known, before[number : number + 1], seconds))
        if any(value not in (None, []) for value in values):
            line[f"gpu_{name}"] = values
    return line


def _one_of(name: str, known: Sequence[Any], before: Sequence[GpuReading], seconds: float) -> Any:
    if name in _ALL:
        return sorted({one for several in known for one in several})
    if not known:
        return None
    if name in _MEANS:
        return round(sum(known) / len(known), 1)
    if name in _HIGHEST:
        return max(known)
    if name in _COUNTERS:
        first = getattr(before[0], name) if before else None
        return None if first is None or seconds <= 0 else round(max(0, known[-1] - first) / seconds)
    return known[-1]


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Measure this node until nobody wants that any more."""
    run, node = RunDir(Path(argv[-2])), int(argv[-1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    with GpuReader(visible_devices(environ)) as gpus:
        sampler = Sampler(run.telemetry(node), gpus, NodeReader(), host=host_name(environ))
        try:
            sampler.begin()
            while not select.select([sys.stdin], [], [], READ_EVERY_S)[0]:
                sampler.read()
            sampler.read()
            sampler.flush()
        except OSError as error:
            # A training does not depend on being measured.
            print(f"hpctrain: the node is not measured any more: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
