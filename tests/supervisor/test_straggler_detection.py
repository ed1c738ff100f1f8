"""Detection of slow ranks."""

import pytest

from hpctrain.supervisor.workers.straggler_detection import (
    LASTING_WINDOWS,
    StepTimes,
    StragglerDetector,
    find_stragglers,
)


def step_times(steps: int, data: float, compute: float, whole: float) -> StepTimes:
    """Return the times of that many steps of that many seconds."""
    return StepTimes(steps, steps * data, steps * compute, steps * (whole - data - compute), steps, steps)


FAST = (5, 0.0, 0.1, 0.4)


@pytest.mark.parametrize(
    ("times", "slow"),
    [
        ([(10, 0.01, 0.09, 1.0), (10, 0.01, 0.09, 1.0), (10, 0.01, 0.99, 1.0)], [(2, 10.0, "compute")]),
        ([(10, 0.35, 0.1, 0.5), (10, 0.01, 0.1, 0.5), (10, 0.01, 0.1, 0.5)], [(0, 4.1, "data")]),
        ([FAST, (5, 0.0, 0.4, 0.4)], [(1, 4.0, "compute")]),
        ([(5, 0.0, 0.01, 1.0), (5, 0.0, 0.03, 1.0)], []),
        ([FAST] * 8, []),
        ([FAST], []),
    ],
    ids=["compute", "data", "two ranks", "small difference", "equal", "single rank"],
)
def test_slow_ranks_are_found(times, slow):
    found = find_stragglers({rank: step_times(*rank_times) for rank, rank_times in enumerate(times)})
    assert [(straggler.rank, round(straggler.ratio, 1), straggler.part) for straggler in found] == slow


def test_straggler_lasts_after_several_windows():
    stragglers = StragglerDetector(2)
    times = []
    for window in range(1, 2 * LASTING_WINDOWS + 2):
        stragglers.on_heartbeat(0, step_times(10 * window, 0.0, 0.1, 1.0))
        stragglers.on_heartbeat(1, step_times(10 * window, 0.0, 0.9, 1.0))
        times += [number for _, number in stragglers.check_window(20.0 * window)]
    assert times == list(range(1, 2 * LASTING_WINDOWS + 1))
    # From here on, both are equally fast.
    stragglers.on_heartbeat(0, StepTimes(170, 0.0, 57.0, 113.0, 170, 170))
    stragglers.on_heartbeat(1, StepTimes(170, 0.0, 113.0, 57.0, 170, 170))
    assert stragglers.check_window(1000.0) == []


@pytest.mark.parametrize(("ratio", "slow"), [(1.0, set()), (1.8, {1})])
@pytest.mark.parametrize("step_s", [0.1, 2.5, 12.0])
def test_measurements_of_every_tenth_step_find_the_slow_rank(step_s, ratio, slow):
    """On a GPU, a measurement arrives some steps later, and not at the same time on all ranks."""
    stragglers = StragglerDetector(2)
    found = set()
    for now in range(1, 1200):
        for rank in range(2):
            steps = int(now / step_s)
            measured = max(0, steps - 3 * rank) // 10
            compute_s = 0.5 * step_s * (ratio if rank else 1.0)
            timed = 10 * measured
            times = (0.0, timed * compute_s, timed * (step_s - compute_s))
            stragglers.on_heartbeat(rank, StepTimes(steps, *times, timed, measured))
        found |= {straggler.rank for straggler, _ in stragglers.check_window(float(now))}
    assert found == slow
