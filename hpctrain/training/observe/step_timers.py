"""Measure the time of steps: waits for data, computation, and the exchange with other ranks."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import nn

from hpctrain.record_types import RankPhase
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.rank_activity import activity
from hpctrain.telemetry.startup_parts import StartupPart, startup_times

T = TypeVar("T")


@dataclass(frozen=True)
class TimingSample:
    time: float
    spent: dict[str, float]
    """Seconds by name; `all` is the total since the previous sample."""


class StepTimer:
    def __init__(self, device: torch.device, world_size: int) -> None:
        self._device, self._on_gpu, self._has_others = device, device.type == "cuda", world_size > 1
        self._since, self._seconds = time.perf_counter(), dict[str, float]()
        self._exchange_s, self._uncounted_s, self._data_wait_s = activity.exchange_s, 0.0, 0.0
        self.started_at, self.waited_s = self._since, 0.0
        """Start on the clock of `time.perf_counter`, and all seconds of waiting for data since then."""

    def sample(self) -> TimingSample:
        sampled_at = time.perf_counter()
        taken = {"all": sampled_at - self._since, **self._seconds, "data": self._data_wait_s}
        taken["communication"] = self._communication(2 * taken["all"] - sum(taken.values()))
        self._since, self._seconds, self._data_wait_s = sampled_at, {}, 0.0
        return TimingSample(time.time(), {name: round(seconds, 6) for name, seconds in taken.items()})

    def _communication(self, room_s: float) -> float:
        """Return the communication since the last sample, at most `room_s`; the excess comes later."""
        self._uncounted_s += activity.exchange_s - self._exchange_s
        self._exchange_s = activity.exchange_s
        seconds = min(self._uncounted_s, max(0.0, room_s)) if self._has_others else 0.0
        self._uncounted_s -= seconds
        return seconds

    @contextmanager
    def measure(self, name: Literal["validation"]) -> Iterator[None]:
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
                self.waited_s += seconds
            yield batch


#: Interval of measured steps on a GPU.
_SAMPLE_INTERVAL = 10


class ComputeTimer:
    """Timer that adds each step's times to the counters of `activity`."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, context: DistributedContext
    ) -> None:
        self._on_gpu = context.device.type == "cuda"
        self._started_at = self._elsewhere = self._local_done = 0.0
        self._events: list[torch.cuda.Event] = []
        self._since_sample, self._is_sampled = 0, False
        if self._on_gpu:
            activity.timed_steps = activity.measured_steps = 0
        first_parameter = next((p for p in module.parameters() if p.requires_grad), None)
        if first_parameter is not None and context.is_distributed:
            first_parameter.register_post_accumulate_grad_hook(self._record_last_gradient)  # type: ignore[no-untyped-call]
            optimizer.register_step_pre_hook(self._record_update)

    def begin(self) -> None:
        if self._on_gpu:
            self._read_sample()
            self._since_sample += 1
            self._is_sampled = not self._events and self._since_sample >= _SAMPLE_INTERVAL
            if self._is_sampled:
                self._events = [_event_now()]
        self._started_at, self._elsewhere = time.perf_counter(), activity.data_s + activity.exchange_s

    def end(self) -> None:
        if self._on_gpu:
            if self._is_sampled:
                self._is_sampled = False
                self._events.append(_event_now())
        else:
            waited = activity.data_s + activity.exchange_s - self._elsewhere
            activity.compute_s += time.perf_counter() - self._started_at - waited
        activity.step_done()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Count the block as exchange, because it waits for all ranks."""
        begun = time.perf_counter()
        yield
        if not self._on_gpu:
            activity.exchange_s += time.perf_counter() - begun

    def _record_update(self, *_: object) -> None:
        if self._local_done:
            activity.exchange_s += time.perf_counter() - self._local_done
            self._local_done = 0.0

    def _record_last_gradient(self, _parameter: torch.Tensor) -> None:
        if not self._on_gpu:
            self._local_done = time.perf_counter()
        elif self._is_sampled:
            # With several backward passes per step, the last pass is used.
            self._events[1:] = [_event_now()]

    def _read_sample(self) -> None:
        """Read the last sample if the GPU has completed it, without waiting."""
        if not self._events or not self._events[-1].query():  # type: ignore[no-untyped-call]
            return
        begin, *between, end = self._events
        done = between[-1] if between else end
        activity.compute_s += begin.elapsed_time(done) / 1000 * self._since_sample
        activity.exchange_s += done.elapsed_time(end) / 1000 * self._since_sample
        activity.timed_steps = (activity.timed_steps or 0) + self._since_sample
        activity.measured_steps = (activity.measured_steps or 0) + 1
        self._events, self._since_sample = [], 0


def _event_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
