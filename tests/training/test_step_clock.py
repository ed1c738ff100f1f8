"""What a rank spends by itself in a step, and what with the others, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hpctrain.runtime.rank_activity import RankActivity
from hpctrain.training.observe import compute_timer
from hpctrain.training.observe.compute_timer import ComputeTimer


@pytest.fixture
def pulse(monkeypatch):
    fresh = RankActivity()
    monkeypatch.setattr(compute_timer, "activity", fresh)
    return fresh


class Moves:
    """Time, in seconds."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def event(self) -> SimpleNamespace:
        """As an event of CUDA that is recorded now, and through which the GPU has come at once."""
        at = self.now
        return SimpleNamespace(at=at, query=lambda: True, elapsed_time=lambda other: 1000 * (other.at - at))


@pytest.fixture
def moves(monkeypatch):
    moves = Moves()
    monkeypatch.setattr(compute_timer, "time", moves)
    monkeypatch.setattr(compute_timer, "_event_now", moves.event)
    return moves


def rig(device: str):
    module = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters())
    team = SimpleNamespace(device=SimpleNamespace(type=device), is_distributed=True)
    return module, optimizer, ComputeTimer(module, optimizer, team)


@contextmanager
def step(clock: ComputeTimer) -> Iterator[None]:
    clock.begin()
    yield
    clock.end()


def backward(module) -> None:
    module(torch.ones(1, 2)).sum().backward()


def test_from_the_last_gradient_to_the_update_others_are_waited_for(pulse, moves):
    module, optimizer, clock = rig("cpu")
    with step(clock):
        moves.now += 0.5
        pulse.data_s += 0.25  # of these, as whoever fetches the batch would note
        moves.now += 2.0
        backward(module)
        moves.now += 3.0
        optimizer.step()
        moves.now += 1.0
    assert (pulse.compute_s, pulse.exchange_s, pulse.step) == (3.25, 3.0, 1)


def test_what_waits_for_all_ranks_is_no_computing(pulse, moves):
    _, _, clock = rig("cpu")
    with step(clock):
        moves.now += 1.0
        with clock.exchange():
            moves.now += 4.0
    assert (pulse.compute_s, pulse.exchange_s) == (1.0, 4.0)


def test_a_step_without_a_backward_pass_is_all_computing(pulse, moves):
    _, optimizer, clock = rig("cpu")
    with step(clock):
        moves.now += 2.0
        optimizer.step()
    assert (pulse.compute_s, pulse.exchange_s) == (2.0, 0.0)


def test_on_a_pretended_gpu_one_step_in_ten_is_measured_and_counts_for_all(pulse, moves):
    module, optimizer, clock = rig("cuda")
    for _ in range(21):
        with step(clock):
            moves.now += 2.0
            backward(module)
            moves.now += 1.0
            optimizer.step()
    assert (pulse.compute_s, pulse.exchange_s, pulse.step) == (40.0, 20.0, 21)


def test_a_pretended_gpu_that_lags_is_not_waited_for(pulse, moves, monkeypatch):
    done = []
    late = lambda: SimpleNamespace(**{**vars(moves.event()), "query": lambda: bool(done)})  # noqa: E731
    monkeypatch.setattr(compute_timer, "_event_now", late)
    module, _, clock = rig("cuda")
    for number in range(31):
        if number == 30:
            done.append(True)
        with step(clock):
            moves.now += 1.0
            backward(module)
    assert pulse.step == 31
    assert pulse.compute_s == 30.0, "of the steps up to the one that is read, the sampled one stands for all"
