"""Delivery of the lines of `metrics.jsonl` to a logger: each step once, over all attempts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from hpctrain.files import open_regular
from hpctrain.telemetry.accounting.metric_fields import metric_values
from hpctrain.telemetry.loggers.logger import LoggedRun, Logger, MetricRecord, TrainingEnd
from hpctrain.telemetry.loggers.logger_state import LoggerState

#: Seconds between two deliveries: short at first, when the user may be watching, longer after a minute.
_FIRST_S, _LATER_S, _FIRST_FOR_S = 1.0, 5.0, 60.0
_RETRY_AFTER_S = 15.0
_MOST_BYTES = 1 << 20
#: Lines per delivery. If the process is killed, lines in flight are not sent again.
_MOST_LINES = 32


class LoggerDispatcher:
    """Delivery of metrics to one logger."""

    def __init__(
        self, logger: Logger, run: LoggedRun, metrics: Path, memory: LoggerState, say: Callable[[str], None]
    ) -> None:
        self._logger, self._run, self._metrics, self._memory = logger, run, metrics, memory
        self._say, self._said, self._is_started = say, False, False

    def run(self, ended: threading.Event, ending: Callable[[], TrainingEnd]) -> None:
        """Deliver new lines repeatedly until the training has ended and all are delivered."""
        begun, pause_s = time.monotonic(), 0.0
        while not ended.wait(pause_s):
            every_s = _FIRST_S if time.monotonic() - begun < _FIRST_FOR_S else _LATER_S
            pause_s = every_s if self.advance() else _RETRY_AFTER_S
        self.advance()
        if self._is_started:
            try:
                self._logger.finish(ending())
            except Exception as error:  # noqa: BLE001 (whatever a tracker's client may raise)
                self._tell(error)

    def advance(self) -> bool:
        """Deliver new lines; return True on success."""
        try:
            if not self._is_started:
                self._memory.known = self._logger.start(replace(self._run, known=self._memory.known))
                self._memory.save()
                self._is_started = True
            while self._bring_a_part():
                pass
        except Exception as error:  # noqa: BLE001 (whatever a tracker's client may raise)
            self._tell(error)
            return False
        if self._said:
            self._say(f"hpctrain: the logger {self._logger.name!r} works again and has received all metrics.")
            self._said = False
        return True

    def _bring_a_part(self) -> bool:
        """Deliver the next lines, at most 1 MiB; return True if there were any."""
        memory = self._memory
        text, end = self._read()
        batch: list[MetricRecord] = []
        steps = dict(memory.steps)
        begin, done = end - len(text), 0
        for line, read in _lines(text):
            if len(batch) == _MOST_LINES:
                self._deliver(batch, steps)
                memory.offset, batch = begin + done, []
            if line.attempt > memory.attempt:
                if line.step <= max(steps.values(), default=-1):
                    self._deliver(batch, steps)
                    batch = []
                    if self._logger.rewind(line.step - 1):
                        steps = {name: min(step, line.step - 1) for name, step in steps.items()}
                memory.attempt = line.attempt
            new = {name: value for name, value in line.values.items() if line.step > steps.get(name, -1)}
            if new:
                batch.append(replace(line, values=new))
                steps |= dict.fromkeys(new, line.step)
            done = read
        self._deliver(batch, steps)
        is_new = end != memory.offset
        if is_new:
            memory.offset = end
            memory.save()
        return is_new

    def _deliver(self, batch: list[MetricRecord], steps: dict[str, int]) -> None:
        if not batch:
            return
        self._memory.save(sending=steps)
        try:
            self._logger.log(batch)
        except BaseException:
            self._memory.save()
            raise
        self._memory.steps = dict(steps)

    def _read(self) -> tuple[bytes, int]:
        """Return complete lines that are not delivered yet, and the offset of their end."""
        begin = self._memory.offset
        try:
            with open_regular(self._metrics) as file:
                if file.seek(0, 2) < begin:  # The file was replaced by a shorter one.
                    begin = 0
                file.seek(begin)
                text = file.read(_MOST_BYTES)
        except FileNotFoundError:
            return b"", begin
        text = text[: text.rfind(b"\n") + 1]
        return text, begin + len(text)

    def _tell(self, error: Exception) -> None:
        if not self._said:
            self._said = True
            self._say(
                f"hpctrain: the logger {self._logger.name!r} does not accept metrics: "
                f"{type(error).__name__}: {error}. Training continues; the metrics are kept in "
                f"{self._metrics} and sent when the logger works again."
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
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            continue  # Truncated by a crash.
        yield MetricRecord(step, time, attempt, epoch, metric_values(record)), read
