"""How long a rank computes by itself in a step, and how long it is with the others: that tells who is slow.

The gradient of the first parameter is the last one to be computed; from there to the update others are waited
for. On a GPU this is measured there, in one step of ten, and counts for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from hpctrain.runtime.process_group import Team
from hpctrain.runtime.pulse import pulse

#: On a GPU one step in so many is measured.
_ONE_IN = 10


class StepClock:
    """Adds to this rank's pulse what its steps take."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer, team: Team) -> None:
        """Notice when the last gradient is there, and when the update begins: others work in between."""
        self._on_gpu = team.device.type == "cuda"
        self._begun = self._elsewhere = self._local_done = 0.0
        self._events: list[torch.cuda.Event] = []
        self._since_sample = 0
        self._is_sampled = False
        first = next((parameter for parameter in module.parameters() if parameter.requires_grad), None)
        if first is not None and team.is_distributed:
            first.register_post_accumulate_grad_hook(self._note_last_gradient)  # type: ignore[no-untyped-call]
            optimizer.register_step_pre_hook(self._note_update)

    def begin(self) -> None:
        """A step begins: until it ends, all but waits for data and for others is computed by this rank."""
        if self._on_gpu:
            self._begin_on_gpu()
        self._begun, self._elsewhere = time.perf_counter(), pulse.data_s + pulse.exchange_s

    def end(self) -> None:
        """The step ends."""
        if self._on_gpu:
            if self._is_sampled:
                self._is_sampled = False
                self._events.append(_event_now())
        else:
            waited = pulse.data_s + pulse.exchange_s - self._elsewhere
            pulse.compute_s += time.perf_counter() - self._begun - waited
        pulse.trained()

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Something is inside that waits for all ranks."""
        begun = time.perf_counter()
        yield
        if not self._on_gpu:
            pulse.exchange_s += time.perf_counter() - begun

    def _note_update(self, *_: object) -> None:
        if self._local_done:
            pulse.exchange_s += time.perf_counter() - self._local_done
            self._local_done = 0.0

    def _note_last_gradient(self, _parameter: torch.Tensor) -> None:
        if not self._on_gpu:
            self._local_done = time.perf_counter()
        elif self._is_sampled:
            # Of several backward passes in a step the last one counts.
            self._events[1:] = [_event_now()]

    def _begin_on_gpu(self) -> None:
        self._read_sample()
        self._since_sample += 1
        self._is_sampled = not self._events and self._since_sample >= _ONE_IN
        if self._is_sampled:
            self._events = [_event_now()]

    def _read_sample(self) -> None:
        """Take in the last sample once the GPU has come to its end; nobody waits for that."""
        if not self._events or not self._events[-1].query():  # type: ignore[no-untyped-call]
            return
        begin, *between, end = self._events
        done = between[-1] if between else end
        pulse.compute_s += begin.elapsed_time(done) / 1000 * self._since_sample
        pulse.exchange_s += done.elapsed_time(end) / 1000 * self._since_sample
        self._events, self._since_sample = [], 0


def _event_now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
