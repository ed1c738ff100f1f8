"""Brings the lines of `metrics.jsonl` to a logger: each step once, however often the ranks are started."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from hpctrain.telemetry.loggers.memory import Memory
from hpctrain.telemetry.loggers.protocol import Ending, Line, LoggedRun, Logger
from hpctrain.telemetry.metrics import metrics_of

#: Seconds between two deliveries: few while somebody may be looking, more in a run that goes on for hours.
_FIRST_S, _LATER_S, _FIRST_FOR_S = 1.0, 5.0, 60.0
_RETRY_AFTER_S = 15.0
_MOST_BYTES = 1 << 20
#: Lines that are brought at once: those on their way when the process is killed do not come again.
_MOST_LINES = 32


class Feed:
    """What one logger gets."""

    def __init__(
        self, logger: Logger, run: LoggedRun, metrics: Path, memory: Memory, say: Callable[[str], None]
    ) -> None:
        self._logger, self._run, self._metrics, self._memory = logger, run, metrics, memory
        self._say, self._said, self._is_started = say, False, False

    def run(self, ended: threading.Event, ending: Callable[[], Ending]) -> None:
        """Bring what there is, again and again, until the training has ended and all has been brought."""
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
        """Bring what is new; tells whether that went well."""
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
            self._say(f"hpctrain: the logger {self._logger.name!r} gets the metrics again, and all of them.")
            self._said = False
        return True

    def _bring_a_part(self) -> bool:
        """Bring the next lines, a megabyte of them at the most; tells whether there were any."""
        memory = self._memory
        text, end = self._read()
        batch: list[Line] = []
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

    def _deliver(self, batch: list[Line], steps: dict[str, int]) -> None:
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
        """Whole lines that were not brought yet, and where they end."""
        begin = self._memory.offset
        try:
            with open(self._metrics, "rb") as file:
                if file.seek(0, 2) < begin:  # Somebody has put another file in its place.
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
                f"hpctrain: the logger {self._logger.name!r} does not take the metrics: "
                f"{type(error).__name__}: {error}. Training goes on; they are kept in {self._metrics} "
                "and brought once that works again."
            )


def _lines(text: bytes) -> Iterator[tuple[Line, int]]:
    """Each line, and how many bytes end with it."""
    read = 0
    for row in text.splitlines(keepends=True):
        read += len(row)
        try:
            record = json.loads(row)
            step, time = int(record["step"]), float(record["time"])
            attempt, epoch = int(record.get("attempt", 0)), int(record.get("epoch", 0))
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            continue  # A crash has cut it.
        yield Line(step, time, attempt, epoch, metrics_of(record)), read
