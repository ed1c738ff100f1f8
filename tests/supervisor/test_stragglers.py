"""Which ranks are slow by themselves."""

from __future__ import annotations

from hpctrain.supervisor.workers.straggler_detection import (
    LASTING_WINDOWS,
    StepTimes,
    StragglerDetector,
    find_stragglers,
)


def of_steps(steps: int, data: float, compute: float, whole: float) -> StepTimes:
    """So many steps, each of which takes so many seconds."""
    return StepTimes(steps, steps * data, steps * compute, steps * (whole - data - compute))


def test_a_rank_that_computes_for_longer_is_named_with_its_ratio():
    spent = {rank: of_steps(10, 0.01, 0.09, 1.0) for rank in range(4)}
    spent[2] = of_steps(10, 0.01, 0.99, 1.0)
    (slow,) = find_stragglers(spent)
    assert (slow.rank, round(slow.ratio, 1), slow.part) == (2, 10.0, "compute")


def test_a_rank_that_waits_for_its_data_is_told_apart():
    spent = {rank: of_steps(10, 0.01, 0.1, 0.5) for rank in range(4)}
    spent[0] = of_steps(10, 0.35, 0.1, 0.5)
    (slow,) = find_stragglers(spent)
    assert (slow.rank, slow.part) == (0, "data")


def test_of_two_ranks_the_slower_one_is_slow():
    (slow,) = find_stragglers({0: of_steps(5, 0.0, 0.1, 0.4), 1: of_steps(5, 0.0, 0.4, 0.4)})
    assert (slow.rank, round(slow.ratio, 1)) == (1, 4.0)


def test_what_hardly_matters_is_not_told():
    assert find_stragglers({0: of_steps(5, 0.0, 0.01, 1.0), 1: of_steps(5, 0.0, 0.03, 1.0)}) == []


def test_equal_ranks_and_single_ones_are_not_slow():
    assert find_stragglers({rank: of_steps(5, 0.1, 0.2, 0.4) for rank in range(8)}) == []
    assert find_stragglers({0: of_steps(5, 0.1, 0.2, 0.4)}) == []


def test_one_that_stays_slow_lasts_and_one_pause_does_not():
    stragglers = StragglerDetector(2, window_s=10.0)
    times = []
    for window in range(1, 2 * LASTING_WINDOWS + 2):
        stragglers.on_heartbeat(0, of_steps(10 * window, 0.0, 0.1, 1.0))
        stragglers.on_heartbeat(1, of_steps(10 * window, 0.0, 0.9, 1.0))
        times += [number for _, number in stragglers.check_window(10.0 * window)]
    assert times == list(range(1, 2 * LASTING_WINDOWS + 1))
    # As fast as the other from here on.
    stragglers.on_heartbeat(0, StepTimes(170, 0.0, 57.0, 113.0))
    stragglers.on_heartbeat(1, StepTimes(170, 0.0, 113.0, 57.0))
    assert stragglers.check_window(1000.0) == []


def test_nothing_is_said_before_all_ranks_have_trained():
    stragglers = StragglerDetector(3, window_s=0.0)
    stragglers.on_heartbeat(0, of_steps(10, 0.0, 0.1, 1.0))
    stragglers.on_heartbeat(1, of_steps(10, 0.0, 0.9, 1.0))
    assert stragglers.check_window(1.0) == []
    assert stragglers.check_window(2.0) == []
