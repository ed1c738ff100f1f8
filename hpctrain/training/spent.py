"""What the time of the steps is spent on, as far as rank 0's host can tell it apart."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch

from hpctrain.runtime.pulse import pulse

T = TypeVar("T")


class Spent:
    """Adds up seconds since they were last taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._since, self._seconds = time.perf_counter(), dict[str, float]()
        self._begun, self._on_data_s = self._since, 0.0

    def take(self) -> dict[str, float]:
        """All seconds since the last call, and what of them is known, by name; it counts anew from here."""
        now = time.perf_counter()
        taken = {"all": now - self._since, **self._seconds}
        self._since, self._seconds = now, {}
        return {name: round(seconds, 6) for name, seconds in taken.items()}

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
            self._add(name, time.perf_counter() - begun)

    def waiting(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the same; what it takes to get each is a wait for data, unless a GPU computes meanwhile."""
        iterator = iter(batches)
        while True:
            begun = time.perf_counter()
            pulse.enter("data")
            try:
                batch = next(iterator)
            except StopIteration:
                return
            pulse.enter("step")
            pulse.data_s += time.perf_counter() - begun
            if self._device.type != "cuda" or torch.cuda.current_stream(self._device).query():
                seconds = time.perf_counter() - begun
                self._on_data_s += seconds
                self._add("data", seconds)
            yield batch

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
