"""Deliver the metrics of a run and of its GPUs to a logger: each step once, over all attempts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Self

from hpctrain.files import file_size, make_folder, read_new_lines, write_atomic
from hpctrain.rundir import RunDir
from hpctrain.schema import DeliveryState, NodeSample, StepRecord, decode, read_record
from hpctrain.telemetry.accounting.metric_fields import metric_values
from hpctrain.telemetry.loggers.logger import LoggedRun, Logger, MetricRecord, TrainingEnd

#: Seconds between two deliveries: short at first, when the user may be watching, longer after a minute.
_FIRST_S, _LATER_S, _FIRST_FOR_S = 1.0, 5.0, 60.0
_RETRY_AFTER_S = 15.0
#: Lines per delivery. If the process is killed, lines in flight are not sent again.
_MAX_LINES = 32
#: Measurements that are sent, by their field in a telemetry file.
_GPU_FIELDS = {
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


@dataclass
class LoggerState:
    """Persistent delivery state, from which the logger of the next attempt resumes."""

    path: Path
    known: str | None = None
    """Name of the run in the tracker."""
    offset: int = 0
    """Offset of the delivered lines in `metrics.jsonl`, in bytes."""
    attempt: int = -1
    """The newest attempt with delivered lines."""
    steps: dict[str, int] = field(default_factory=dict)
    """The last delivered step of each metric."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the saved state; return an empty one if the file is damaged or missing."""
        try:
            state = read_record(path, DeliveryState)
        except (OSError, ValueError):
            return cls(path)
        # Lines in flight at the end of the process may have been delivered: they are not sent again.
        return cls(path, state.known, state.offset, state.attempt, dict(state.sending or state.steps))

    def save(self, sending: dict[str, int] | None = None) -> None:
        """Write the state. `sending` is the value of `steps` after the next delivery."""
        record = {name: value for name, value in vars(self).items() if name != "path"} | {"sending": sending}
        make_folder(self.path.parent)
        write_atomic(self.path, json.dumps(record) + "\n", durable=False)


class LoggerDispatcher:
    def __init__(
        self, logger: Logger, run: LoggedRun, metrics: Path, state: LoggerState, say: Callable[[str], None]
    ) -> None:
        self._logger, self._run, self._metrics, self._state = logger, run, metrics, state
        self._report, self._error_reported, self._is_started = say, False, False
        self._gpus = GpuMetrics(RunDir(run.folder))

    def run(self, ended: threading.Event, ending: Callable[[], TrainingEnd]) -> None:
        begun, pause_s = time.monotonic(), 0.0
        while not ended.wait(pause_s):
            every_s = _FIRST_S if time.monotonic() - begun < _FIRST_FOR_S else _LATER_S
            pause_s = every_s if self.advance() else _RETRY_AFTER_S
        self.advance()
        if self._is_started:
            try:
                self._logger.finish(ending())
            except Exception as error:  # noqa: BLE001 (whatever a tracker's client may raise)
                self._report_error(error)

    def advance(self) -> bool:
        """Deliver new lines; return True on success."""
        try:
            if not self._is_started:
                self._state.known = self._logger.start(replace(self._run, known=self._state.known))
                self._state.save()
                self._is_started = True
            self._gpus.read()
            while self._deliver_part():
                pass
        except Exception as error:  # noqa: BLE001 (whatever a tracker's client may raise)
            self._report_error(error)
            return False
        if self._error_reported:
            self._report(
                f"hpctrain: the logger {self._logger.name!r} works again and has received all metrics."
            )
            self._error_reported = False
        return True

    def _deliver_part(self) -> bool:
        """Deliver the next lines, at most 1 MiB; return True if there were lines."""
        state = self._state
        text, end = self._read()
        batch: list[MetricRecord] = []
        steps = dict(state.steps)
        begin, done = end - len(text), 0
        for line, read in _lines(text):
            if len(batch) == _MAX_LINES:
                self._deliver(batch, steps)
                state.offset, batch = begin + done, []
            if line.attempt > state.attempt:
                if line.step <= max(steps.values(), default=-1):
                    self._deliver(batch, steps)
                    batch = []
                    if self._logger.rewind(line.step - 1):
                        steps = {name: min(step, line.step - 1) for name, step in steps.items()}
                state.attempt = line.attempt
            new = {name: value for name, value in line.values.items() if line.step > steps.get(name, -1)}
            if new:
                batch.append(replace(line, values=new))
                steps |= dict.fromkeys(new, line.step)
            done = read
        self._deliver(batch, steps)
        is_new = end != state.offset
        if is_new:
            state.offset = end
            state.save()
        return is_new

    def _deliver(self, batch: list[MetricRecord], steps: dict[str, int]) -> None:
        if not batch:
            return
        newest = batch[-1]
        gpu_values = self._gpus.values(newest.time).items()
        gpus = {name: value for name, value in gpu_values if newest.step > steps.get(name, -1)}
        batch[-1] = replace(newest, values={**newest.values, **gpus})
        steps |= dict.fromkeys(gpus, newest.step)
        self._state.save(sending=steps)
        try:
            self._logger.log(batch)
        except BaseException:
            self._state.save()
            raise
        self._state.steps = dict(steps)
        if gpus:
            self._gpus.mark_sent()

    def _read(self) -> tuple[bytes, int]:
        """Return complete undelivered lines, and the offset of their end."""
        try:
            return read_new_lines(self._metrics, self._state.offset)
        except FileNotFoundError:
            return b"", self._state.offset

    def _report_error(self, error: Exception) -> None:
        if not self._error_reported:
            self._error_reported = True
            self._report(
                f"hpctrain: the logger {self._logger.name!r} failed: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. Training continues. The metrics are "
                f"stored in {self._metrics}, and will be sent when the logger works again."
            )


def _lines(text: bytes) -> Iterator[tuple[MetricRecord, int]]:
    """Yield each record, and the number of bytes up to its end."""
    read = 0
    for row in text.splitlines(keepends=True):
        read += len(row)
        try:
            record = decode(row, StepRecord)
        except ValueError:
            continue  # Truncated by a crash.
        values = metric_values(record)
        yield MetricRecord(record.step, record.time, record.attempt, int(record.epoch), values), read


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
        paths = self._run.all_telemetry()
        for path in paths:
            for sample in self._new_samples(path):
                if gpus := _values_by_gpu(sample):
                    self._newest[path.stem] = sample.time, gpus
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
        for name in _GPU_FIELDS.values():
            if numbers := [values[name] for gpus in recent for values in gpus if name in values]:
                metrics[f"gpu/mean/{name}"] = sum(numbers) / len(numbers)
                metrics[f"gpu/min/{name}"], metrics[f"gpu/max/{name}"] = min(numbers), max(numbers)
        return metrics

    def mark_sent(self) -> None:
        """Record that the measurements of the last call of `values` have been sent."""
        self._unsent -= self._offered

    def _new_samples(self, path: Path) -> Iterator[NodeSample]:
        try:
            text, self._offsets[path] = read_new_lines(path, self._offsets.get(path, 0))
        except OSError:
            return
        for line in text.splitlines():
            with suppress(ValueError):
                yield decode(line, NodeSample)


def _values_by_gpu(sample: NodeSample) -> list[dict[str, float]]:
    """Return the measurements of each GPU."""
    columns = {name: getattr(sample, field) or () for field, name in _GPU_FIELDS.items()}
    return [
        {name: float(value) for name, value in zip(columns, values, strict=True) if value is not None}
        for values in zip_longest(*columns.values())
    ]
