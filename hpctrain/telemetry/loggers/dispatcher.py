"""Deliver the metrics of a run and of its GPUs to loggers: each step once, over all attempts.

    python -m hpctrain.telemetry.loggers.dispatcher

runs the loggers separate from rank 0, so that a slow tracker cannot block training. It reads its
settings from standard input, which remains open during training. The last line reports the end of training.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, cast, get_args

from msgspec.structs import asdict

from hpctrain.files import file_size, make_folder, read_new_lines, write_atomic
from hpctrain.record_types import LoggerState, NodeSample, StepRecord, decode, read_record
from hpctrain.rundir import RunDir
from hpctrain.telemetry.loggers.logger import LoggedRun, Logger, MetricRecord, TrainingEnd
from hpctrain.telemetry.report.metric_curves import metric_values

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


def load_state(path: Path) -> LoggerState:
    """Return the saved state of a logger; an empty one if the file is damaged or missing."""
    try:
        state = read_record(path, LoggerState)
    except (OSError, ValueError):
        return LoggerState()
    # Lines in flight at the end of the process may have been delivered: they are not sent again.
    state.steps, state.sending = state.sending or state.steps, None
    return state


class LoggerDispatcher:
    def __init__(self, logger: Logger, run: LoggedRun, report: Callable[[str], None]) -> None:
        folder = RunDir(run.folder)
        self._logger, self._run, self._report = logger, run, report
        self._metrics, self._state_path = folder.metrics, folder.logger_state(logger.name)
        self._state, self._gpus = load_state(self._state_path), GpuMetrics(folder)
        self._error_reported = self._is_started = False

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
                self._save_state()
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
        try:
            text, end = read_new_lines(self._metrics, state.offset)
        except FileNotFoundError:
            return False
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
            self._save_state()
        return is_new

    def _save_state(self, sending: dict[str, int] | None = None) -> None:
        """Write the state. `sending` is the value of `steps` after the next delivery."""
        make_folder(self._state_path.parent)
        record = asdict(self._state) | {"sending": sending}
        write_atomic(self._state_path, json.dumps(record) + "\n", durable=False)

    def _deliver(self, batch: list[MetricRecord], steps: dict[str, int]) -> None:
        if not batch:
            return
        newest = batch[-1]
        gpu_values = self._gpus.values(newest.time).items()
        gpus = {name: value for name, value in gpu_values if newest.step > steps.get(name, -1)}
        batch[-1] = replace(newest, values={**newest.values, **gpus})
        steps |= dict.fromkeys(gpus, newest.step)
        self._save_state(sending=steps)
        try:
            self._logger.log(batch)
        except BaseException:
            self._save_state()
            raise
        self._state.steps = dict(steps)
        if gpus:
            self._gpus.mark_sent()

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
        yield MetricRecord(record.step, record.time, record.attempt, int(record.epoch or 0), values), read


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
            with suppress(OSError):
                text, self._offsets[path] = read_new_lines(path, self._offsets.get(path, 0))
                for line in text.splitlines():
                    self._add_sample(path.stem, line)
        # Nodes that have not reported yet have as many GPUs as the others.
        self._num_gpus = len(paths) * max((len(gpus) for _, gpus in self._newest.values()), default=0)

    def values(self, time: float) -> dict[str, float]:
        """Return the measurements to send with a step that ended at `time`, again until `mark_sent`."""
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

    def _add_sample(self, node: str, line: bytes) -> None:
        try:
            sample = decode(line, NodeSample)
        except ValueError:
            return  # Truncated by a crash.
        columns = {name: getattr(sample, field) or () for field, name in _GPU_FIELDS.items()}
        gpus = [
            {name: float(value) for name, value in zip(columns, values, strict=True) if value is not None}
            for values in zip_longest(*columns.values())
        ]
        if gpus:
            self._newest[node] = sample.time, gpus
            self._unsent.add(node)


#: Seconds allowed for the last lines after training has ended.
_LIMIT_S = 30.0


@dataclass(frozen=True)
class LoggerConfig:
    folder: str
    config: dict[str, Any]
    sys_path: list[str]
    """The module search path of the training process, whose modules may define a logger."""
    loggers: bytes
    """Pickled separately, because unpickling requires those modules."""
    hparams: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return pickle.dumps((self.folder, self.config, self.sys_path, self.loggers, self.hparams))

    @classmethod
    def read(cls, stream: BinaryIO) -> LoggerConfig:
        return cls(*pickle.load(stream))


def main() -> int:
    """Deliver metrics to the loggers until training ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        config = LoggerConfig.read(sys.stdin.buffer)
    except (EOFError, pickle.UnpicklingError):  # Training ended before the configuration was written.
        return 0
    sys.path += [path for path in config.sys_path if path not in sys.path]
    run = RunDir(Path(config.folder))
    logged = LoggedRun(run.run_id, run.path, config=config.config, hparams=config.hparams)
    ended, endings = threading.Event(), list[TrainingEnd]()
    dispatchers = [LoggerDispatcher(logger, logged, _report) for logger in pickle.loads(config.loggers)]
    threads = [
        threading.Thread(target=dispatcher.run, args=(ended, lambda: endings[0]), daemon=True)
        for dispatcher in dispatchers
    ]
    for thread in threads:
        thread.start()
    # A killed training sends nothing.
    ending = sys.stdin.buffer.readline().decode("ascii", "replace").strip()
    endings.append(cast(TrainingEnd, ending) if ending in get_args(TrainingEnd) else "failed")
    ended.set()
    deadline = time.monotonic() + _LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    sys.stdout.flush()
    sys.stderr.flush()
    # Remaining threads of a tracker's client must not keep the process alive.
    os._exit(0)


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
