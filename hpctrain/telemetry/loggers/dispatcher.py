"""Deliver the lines of `metrics.jsonl` to a logger: each step once, over all attempts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from hpctrain.files import make_folder, read_json, read_new_lines, write_atomic
from hpctrain.rundir import RunDir
from hpctrain.telemetry.accounting.metric_fields import metric_values
from hpctrain.telemetry.loggers.gpu_metrics import GpuMetrics
from hpctrain.telemetry.loggers.logger import LoggedRun, Logger, MetricRecord, TrainingEnd

#: Seconds between two deliveries: short at first, when the user may be watching, longer after a minute.
_FIRST_S, _LATER_S, _FIRST_FOR_S = 1.0, 5.0, 60.0
_RETRY_AFTER_S = 15.0
#: Lines per delivery. If the process is killed, lines in flight are not sent again.
_MAX_LINES = 32


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
            record = read_json(path)
            offset, attempt = int(record["offset"]), int(record["attempt"])
            # Lines in flight at the end of the process may have been delivered: they are not sent again.
            steps = {str(name): int(step) for name, step in (record["sending"] or record["steps"]).items()}
            tracker_run = None if record["known"] is None else str(record["known"])
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return cls(path)
        return cls(path, tracker_run, offset, attempt, steps)

    def save(self, sending: dict[str, int] | None = None) -> None:
        """Write the state. `sending` is the value of `steps` after the next delivery."""
        record = {name: value for name, value in vars(self).items() if name != "path"} | {"sending": sending}
        make_folder(self.path.parent)
        write_atomic(self.path, json.dumps(record) + "\n", durable=False)


class LoggerDispatcher:
    """Delivery of metrics to one logger."""

    def __init__(
        self, logger: Logger, run: LoggedRun, metrics: Path, state: LoggerState, say: Callable[[str], None]
    ) -> None:
        self._logger, self._run, self._metrics, self._state = logger, run, metrics, state
        self._report, self._error_reported, self._is_started = say, False, False
        self._gpus = GpuMetrics(RunDir(run.folder))

    def run(self, ended: threading.Event, ending: Callable[[], TrainingEnd]) -> None:
        """Deliver new lines repeatedly until training has ended and all lines are delivered."""
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
            record = json.loads(row)
            step, time = int(record["step"]), float(record["time"])
            attempt, epoch = int(record.get("attempt", 0)), int(record.get("epoch", 0))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            continue  # Truncated by a crash.
        yield MetricRecord(step, time, attempt, epoch, metric_values(record)), read
