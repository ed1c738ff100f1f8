"""Timer for the computation of a rank and for its exchange with other ranks, to find slow ranks.

The first parameter's gradient is computed last; from then until the update, the rank waits for others. On a
GPU, CUDA events measure every tenth step, which represents all ten.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.rank_activity import activity

#: Interval of measured steps on a GPU.
_SAMPLE_INTERVAL = 10


class ComputeTimer:
    """Timer that adds each step's times to the counters of `activity`."""

    def __init__(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, context: DistributedContext
    ) -> None:
        """Register hooks for the last gradient and the update; the exchange is in between."""
        self._on_gpu = context.device.type == "cuda"
        self._started_at = self._elsewhere = self._local_done = 0.0
        self._events: list[torch.cuda.Event] = []
        self._since_sample = 0
        self._is_sampled = False
        if self._on_gpu:
            activity.timed_steps = activity.measured_steps = 0
        first = next((parameter for parameter in module.parameters() if parameter.requires_grad), None)
        if first is not None and context.is_distributed:
            first.register_post_accumulate_grad_hook(self._record_last_gradient)  # type: ignore[no-untyped-call]
            optimizer.register_step_pre_hook(self._record_update)

    def begin(self) -> None:
        """Mark the start of a step. Its time counts as computation, except for waits."""
        if self._on_gpu:
            self._begin_on_gpu()
        self._started_at, self._elsewhere = time.perf_counter(), activity.data_s + activity.exchange_s

    def end(self) -> None:
        """Mark the end of the step."""
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

    def _begin_on_gpu(self) -> None:
        self._read_sample()
        self._since_sample += 1
        self._is_sampled = not self._events and self._since_sample >= _SAMPLE_INTERVAL
        if self._is_sampled:
            self._events = [_event_now()]

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
