"""Progress of a training run: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from hpctrain.text import format_number

#: Seconds between two plain lines.
_LINE_INTERVAL_S = 5.0
#: Minimum interval for a rate, in seconds; shorter intervals are too inaccurate.
_PACE_AFTER_S = 1.0


class Progress:
    """Progress display that shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, step: int, scalars: Mapping[str, float]) -> None: ...

    def print_message(self, text: str) -> None: ...


def make_progress(last_step: int | None, is_main: bool, batch_size: int) -> Progress:
    if not is_main:
        return Progress()
    pace = SampleRate(batch_size)
    return _Bar(last_step, pace) if sys.stdout.isatty() else _Lines(last_step, pace)


class SampleRate:
    def __init__(self, batch_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._batch_size, self._clock = batch_size, clock
        self._since: tuple[float, int] | None = None

    def rate_since_last(self, step: int) -> str:
        """Return the rate since the last call as a string; empty initially and for short intervals."""
        now, before = self._clock(), self._since
        if before is not None and (now - before[0] < _PACE_AFTER_S or step <= before[1]):
            return ""
        self._since = now, step
        if before is None:
            return ""
        return f"  {format_number((step - before[1]) * self._batch_size / (now - before[0]))} samples/s"


class _Lines(Progress):
    def __init__(self, last_step: int | None, pace: SampleRate) -> None:
        self._last_step, self._pace = last_step, pace
        self._shown_at = 0.0

    def show(self, step: int, scalars: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._shown_at >= _LINE_INTERVAL_S or step == self._last_step:
            self._shown_at = now
            of = "" if self._last_step is None else f"/{self._last_step}"
            print(f"step {step}{of}  {format_scalars(scalars)}{self._pace.rate_since_last(step)}")

    def print_message(self, text: str) -> None:
        print(text)


class _Bar(Progress):
    def __init__(self, last_step: int | None, pace: SampleRate) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress
        from rich.table import Column

        self._bar = RichProgress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            # Many metrics wrap into several lines, to avoid truncating the number of steps.
            TextColumn("{task.fields[scalars]}", markup=False, table_column=Column()),
        )
        self._pace, self._paced = pace, ""
        self._task: Any = self._bar.add_task("training", total=last_step, scalars="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, step: int, scalars: Mapping[str, float]) -> None:
        self._paced = self._pace.rate_since_last(step) or self._paced
        self._bar.update(self._task, completed=step, scalars=format_scalars(scalars) + self._paced)

    def print_message(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


def format_scalars(scalars: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {format_number(value)}" for name, value in scalars.items())
