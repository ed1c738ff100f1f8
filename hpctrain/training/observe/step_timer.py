"""Breakdown of step time, as measured on the host of rank 0."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from hpctrain.records.rank_phase import RankPhase
from hpctrain.runtime.rank_activity import activity
from hpctrain.telemetry.startup_parts import StartupPart, startup_times

T = TypeVar("T")


@dataclass(frozen=True)
class TimingSample:
    """A time sample, with the breakdown of the seconds since the previous sample."""

    time: float
    """Wall-clock time."""
    spent: dict[str, float]
    """Seconds by name; `all` is the total since the previous sample."""


class StepTimer:
    """Sums of seconds between two samples."""

    def __init__(self, device: torch.device, world_size: int) -> None:
        """Start counting."""
        self._device, self._on_gpu, self._has_others = device, device.type == "cuda", world_size > 1
        self._since, self._seconds = time.perf_counter(), dict[str, float]()
        self._exchange_s, self._uncounted_s = activity.exchange_s, 0.0
        self._started_at, self._data_wait_s, self._data_counted_s = self._since, 0.0, 0.0

    def sample(self) -> TimingSample:
        """Return a sample for the current time, and restart the sums."""
        now = time.perf_counter()
        taken = {"all": now - self._since, **self._seconds, "data": self._data_wait_s - self._data_counted_s}
        taken["communication"] = self._communication(2 * taken["all"] - sum(taken.values()))
        self._since, self._seconds, self._data_counted_s = now, {}, self._data_wait_s
        return TimingSample(time.time(), {name: round(seconds, 6) for name, seconds in taken.items()})

    def _communication(self, room_s: float) -> float:
        """Return the seconds of communication since the last sample, at most `room_s`.

        On a GPU, every tenth step is measured and represents all ten; the excess is moved to the next sample.
        """
        self._uncounted_s += activity.exchange_s - self._exchange_s
        self._exchange_s = activity.exchange_s
        seconds = min(self._uncounted_s, max(0.0, room_s)) if self._has_others else 0.0
        self._uncounted_s -= seconds
        return seconds

    def data_wait(self) -> tuple[float, float]:
        """Return the seconds of waiting for data, and all seconds, since the start."""
        return self._data_wait_s, time.perf_counter() - self._started_at

    @contextmanager
    def measure(self, name: Literal["validation"]) -> Iterator[None]:
        """Count the time of the block under `name`."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - begun

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield `batches`; the time to get a batch counts as waiting for data, unless the GPU is busy."""
        iterator = iter(batches)
        while True:
            activity.set_phase(RankPhase.DATA)
            if not activity.step:
                startup_times.end(StartupPart.SETUP)
            begun = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            seconds = time.perf_counter() - begun
            activity.set_phase(RankPhase.STEP)
            if not activity.step:
                startup_times.end(StartupPart.DATA)
            activity.data_s += seconds
            if not self._on_gpu or torch.cuda.current_stream(self._device).query():
                self._data_wait_s += seconds
            yield batch
