"""What a person sees while a run trains: a bar on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, Self

#: Seconds between two plain lines.
_LINE_EVERY_S = 5.0


class Progress(Protocol):
    """Shows how far a run is. Use as a context manager."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    def show(self, step: int, scalars: Mapping[str, float]) -> None:
        """A step was trained."""

    def say(self, text: str) -> None:
        """Something happened that a person wants to know."""


def make_progress(last_step: int | None, is_main: bool) -> Progress:
    """A bar where rank 0 has a terminal, plain lines where it has none, silence on the other ranks."""
    if not is_main:
        return _Silence()
    return _Bar(last_step) if sys.stdout.isatty() else _Lines(last_step)


class _Silence:
    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def show(self, step: int, scalars: Mapping[str, float]) -> None:
        pass

    def say(self, text: str) -> None:
        pass


class _Lines(_Silence):
    def __init__(self, last_step: int | None) -> None:
        self._last_step = last_step
        self._shown_at = 0.0

    def show(self, step: int, scalars: Mapping[str, float]) -> None:
        now = time.monotonic()
        if now - self._shown_at >= _LINE_EVERY_S or step == self._last_step:
            self._shown_at = now
            of = "" if self._last_step is None else f"/{self._last_step}"
            print(f"step {step}{of}  {format_scalars(scalars)}")

    def say(self, text: str) -> None:
        print(text)


class _Bar(_Silence):
    def __init__(self, last_step: int | None) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[scalars]}"),
        )
        self._task: Any = self._bar.add_task("training", total=last_step, scalars="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, step: int, scalars: Mapping[str, float]) -> None:
        self._bar.update(self._task, completed=step, scalars=format_scalars(scalars))

    def say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


def format_scalars(scalars: Mapping[str, float]) -> str:
    """Names and values for a person, four significant digits each."""
    return "  ".join(f"{name} {value:.4g}" for name, value in scalars.items())
