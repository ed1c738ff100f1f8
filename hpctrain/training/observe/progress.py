"""Print the progress of a training run as lines."""

from __future__ import annotations

import time
from collections.abc import Mapping

from hpctrain.text import format_number

#: Seconds between two lines.
_LINE_INTERVAL_S = 5.0
#: Minimum interval for a rate, in seconds; shorter intervals are too inaccurate.
_PACE_AFTER_S = 1.0


class Progress:
    """Progress on rank 0; other ranks print nothing."""

    def __init__(self, last_step: int | None, batch_size: int, *, is_main: bool) -> None:
        self._last_step, self._batch_size, self._is_main = last_step, batch_size, is_main
        self._shown_at = 0.0
        self._counted: tuple[float, int] | None = None

    def show(self, step: int, scalars: Mapping[str, float]) -> None:
        shown_at = time.monotonic()
        if self._is_main and (shown_at - self._shown_at >= _LINE_INTERVAL_S or step == self._last_step):
            self._shown_at = shown_at
            total = "" if self._last_step is None else f"/{self._last_step}"
            print(f"step {step}{total}  {format_scalars(scalars)}{self._samples_per_second(shown_at, step)}")

    def print_message(self, text: str) -> None:
        if self._is_main:
            print(text)

    def _samples_per_second(self, counted_at: float, step: int) -> str:
        """Return the rate since the last call; empty initially and for short intervals."""
        before = self._counted
        if before is not None and (counted_at - before[0] < _PACE_AFTER_S or step <= before[1]):
            return ""
        self._counted = counted_at, step
        if before is None:
            return ""
        return (
            f"  {format_number((step - before[1]) * self._batch_size / (counted_at - before[0]))} samples/s"
        )


def format_scalars(scalars: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {format_number(value)}" for name, value in scalars.items())
