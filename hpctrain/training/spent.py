"""What the time of the steps is spent on, as far as rank 0's host can tell it apart."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from hpctrain.runtime.pulse import pulse

T = TypeVar("T")


@dataclass(frozen=True)
class Moment:
    """A time, and what the seconds before it were spent on."""

    time: float
    """By the clock on the wall."""
    spent: dict[str, float]
    """Seconds by name; `all` since the moment before."""


class Spent:
    """Adds up seconds from moment to moment."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        """Begin to count, on a rank of so many."""
        self._device, self._on_gpu, self._has_others = device, device.type == "cuda", world_size > 1
        self._since, self._seconds = time.perf_counter(), dict[str, float]()
        self._exchange_s, self._untold_s = pulse.exchange_s, 0.0
        self._begun, self._on_data_s, self._data_told_s = self._since, 0.0, 0.0

    def now(self) -> Moment:
        """This moment; seconds are counted anew from here."""
        now = time.perf_counter()
        taken = {"all": now - self._since, **self._seconds, "data": self._on_data_s - self._data_told_s}
        taken["communication"] = self._communication(2 * taken["all"] - sum(taken.values()))
        self._since, self._seconds, self._data_told_s = now, {}, self._on_data_s
        return Moment(time.time(), {name: round(seconds, 6) for name, seconds in taken.items()})

    def _communication(self, room_s: float) -> float:
        """Seconds with the other ranks since the last moment, of which `room_s` have room in its time.

        On a GPU one step in ten is measured and counts for all of them: what has no room here comes next.
        """
        self._untold_s += pulse.exchange_s - self._exchange_s
        self._exchange_s = pulse.exchange_s
        told = min(self._untold_s, max(0.0, room_s)) if self._has_others else 0.0
        self._untold_s -= told
        return told

    def on_data(self) -> tuple[float, float]:
        """Seconds of waiting for data, and all seconds, since the beginning."""
        return self._on_data_s, time.perf_counter() - self._begun

    @contextmanager
    def on(self, name: Literal["validation"]) -> Iterator[None]:
        """Count what is done inside."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the same; what it takes to get each is a wait for data, unless a GPU computes meanwhile."""
        iterator = iter(batches)
        while True:
            pulse.enter("data")
            begun = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            seconds = time.perf_counter() - begun
            pulse.enter("step")
            pulse.data_s += seconds
            if not self._on_gpu or torch.cuda.current_stream(self._device).query():
                self._on_data_s += seconds
            yield batch
