"""The times that a rank spends computing and exchanging in a step, on a simulated clock."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain.runtime.rank_activity import RankActivity
from hpctrain.training.observe import step_timers
from hpctrain.training.observe.step_timers import ComputeTimer


@pytest.fixture
def activity(monkeypatch):
    rank_activity = RankActivity()
    monkeypatch.setattr(step_timers, "activity", rank_activity)
    return rank_activity


class FakeClock:
    """Time in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def event(self) -> SimpleNamespace:
        """Return a CUDA event that is recorded and reached now."""
        recorded_at = self.now
        return SimpleNamespace(
            at=recorded_at, query=lambda: True, elapsed_time=lambda other: 1000 * (other.at - recorded_at)
        )


@pytest.fixture
def clock(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(step_timers, "time", clock)
    monkeypatch.setattr(step_timers, "_event_now", clock.event)
    return clock


def make_timer(device: str):
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters())
    context = SimpleNamespace(device=SimpleNamespace(type=device), is_distributed=True)
    return module, optimizer, ComputeTimer(module, optimizer, context)


@contextmanager
def step(timer: ComputeTimer) -> Iterator[None]:
    timer.begin()
    yield
    timer.end()


def backward(module) -> None:
    module(torch.ones(1, 2)).sum().backward()


def test_time_from_last_gradient_to_update_is_exchange(activity, clock):
    module, optimizer, timer = make_timer("cpu")
    with step(timer):
        clock.now += 0.5
        activity.data_s += 0.25  # part of these, as the code that fetches the batch would record
        clock.now += 2.0
        backward(module)
        clock.now += 3.0
        optimizer.step()
        clock.now += 1.0
    assert (activity.compute_s, activity.exchange_s, activity.step) == (3.25, 3.0, 1)


def test_one_step_in_ten_is_measured_on_a_fake_gpu(activity, clock):
    module, optimizer, timer = make_timer("cuda")
    for _ in range(21):
        with step(timer):
            clock.now += 2.0
            backward(module)
            clock.now += 1.0
            optimizer.step()
    assert (activity.compute_s, activity.exchange_s, activity.step) == (40.0, 20.0, 21)
