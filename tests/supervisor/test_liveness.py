"""When a run counts as hung, and which rank it is that the others wait for."""

from __future__ import annotations

import math

import pytest

from hpctrain.supervisor.workers.hang_detection import HangDetector, PhaseLimits, RankSnapshot, blocking_ranks


def trained(steps: int, seconds: float, ranks: int = 2, floor_s: float | None = 60.0) -> HangDetector:
    """Ranks that have trained so many steps, each of so many seconds."""
    liveness = HangDetector(PhaseLimits(floor_s))
    for step in range(steps + 1):
        for rank in range(ranks):
            liveness.on_heartbeat(rank, "step", step, step, step * seconds)
    return liveness


def test_a_run_hangs_where_no_rank_gets_on_for_longer_than_the_floor():
    liveness = trained(5, 1.0)
    assert liveness.find_hang(64.0) is None
    overdue = liveness.find_hang(66.0)
    assert overdue is not None
    assert (overdue.seconds, overdue.limit_s) == (61.0, 60.0)


def test_the_limit_grows_with_the_longest_step_of_the_run():
    liveness = trained(5, 20.0)
    assert liveness.find_hang(100.0 + 199.0) is None
    assert liveness.find_hang(100.0 + 201.0) is not None


def test_what_was_learned_outlives_an_attempt():
    limits = trained(5, 20.0).limits
    again = HangDetector(PhaseLimits(60.0, dict(limits.max_duration_s)))
    again.on_heartbeat(0, "step", 1, 1, 0.0)
    assert again.find_hang(199.0) is None
    assert again.find_hang(201.0) is not None


def test_one_rank_that_gets_on_is_enough():
    liveness = trained(5, 1.0)
    liveness.on_heartbeat(1, "step", 6, 6, 60.0)
    assert liveness.find_hang(100.0) is None


def test_the_most_patient_phase_counts():
    liveness = trained(5, 1.0)
    liveness.on_heartbeat(0, "save", 5, 6, 6.0)
    assert liveness.find_hang(700.0) is None
    assert liveness.find_hang(6.0 + 12 * 60.0 + 1.0) is not None


def test_what_a_rank_did_last_that_says_nothing_any_more_does_not_count():
    """One that holds Python's lock in its fifth step was last heard before its first."""
    liveness = HangDetector(PhaseLimits(60.0, {"load": 40.0}))
    liveness.on_heartbeat(1, "load", 0, 1, 0.0)
    for second in range(100):
        liveness.on_heartbeat(0, "step", 5, 5, float(second))
        liveness.on_message(0, float(second))
    overdue = liveness.find_hang(99.0)
    assert overdue is not None
    assert overdue.limit_s == 60.0
    liveness.on_message(1, 99.0)
    assert liveness.find_hang(99.0) is None


def test_a_heartbeat_without_progress_is_none():
    liveness = trained(5, 1.0)
    for second in range(6, 70):
        liveness.on_heartbeat(0, "step", 5, 5, float(second))
        liveness.on_heartbeat(1, "step", 5, 5, float(second))
    assert liveness.find_hang(70.0) is not None


def test_the_first_step_may_take_longer():
    liveness = trained(0, 1.0)
    assert liveness.find_hang(350.0) is None
    assert liveness.find_hang(361.0) is not None


def test_the_end_of_a_script_has_no_limit():
    liveness = HangDetector(PhaseLimits(60.0))
    liveness.on_heartbeat(0, "end", 0, 0, 0.0)
    assert liveness.find_hang(1e9) is None


def test_idle_start_has_a_longer_limit():
    liveness = HangDetector(PhaseLimits(60.0))
    liveness.on_heartbeat(0, "start", 0, 0, 0.0)
    assert liveness.find_hang(360.0) is None
    assert liveness.find_hang(361.0) is not None
    liveness.on_heartbeat(0, "start", 0, 1, 361.0)
    assert liveness.find_hang(700.0) is None


def test_script_that_is_busy_without_steps_hangs_after_twelve_times_the_limit():
    liveness = HangDetector(PhaseLimits(60.0))
    liveness.on_heartbeat(0, "script", 5, 5, 0.0)
    for second in range(1, 800):
        liveness.on_heartbeat(0, "script", 5, 5 + second, float(second))
    assert liveness.find_hang(720.0) is None
    assert liveness.find_hang(800.0).limit_s == 720.0


def test_idle_script_hangs_after_the_limit_and_longer_evaluations_raise_that_of_steps():
    liveness = HangDetector(PhaseLimits(60.0))
    liveness.on_heartbeat(0, "script", 5, 5, 0.0)
    assert liveness.find_hang(61.0).limit_s == 60.0
    for second in range(1, 200):
        liveness.on_heartbeat(0, "script", 5, 5 + second, float(second))
    liveness.on_heartbeat(0, "script", 6, 205, 200.0)
    assert liveness.limits.limit_s("step gap") == 2000.0


def test_without_a_floor_nothing_is_a_hang():
    assert trained(5, 1.0, floor_s=None).find_hang(1e9) is None
    assert PhaseLimits(None).limit_s("step") == math.inf


def test_ranks_that_have_left_do_not_hang():
    liveness = trained(5, 1.0)
    liveness.remove_rank(0)
    liveness.remove_rank(1)
    assert liveness.find_hang(1e9) is None


def test_a_job_that_was_suspended_does_not_hang():
    liveness = trained(5, 1.0)
    liveness.discount_pause(1000.0)
    assert liveness.find_hang(1060.0) is None


BUSY = RankSnapshot("step", 7, "training_step (train.py:12)", waits=False)
WAITS = RankSnapshot("step", 7, "backward (train.py:20)", waits=True)


@pytest.mark.parametrize(
    ("told", "silent", "ranks"),
    [
        ({0: WAITS, 1: BUSY, 2: WAITS}, [], [1]),
        ({0: WAITS, 2: WAITS}, [1], [1]),
        ({0: WAITS, 1: RankSnapshot("step", 6, "elsewhere", waits=True), 2: WAITS}, [], [1]),
        ({0: BUSY, 1: RankSnapshot("step", 7, "other (train.py:3)", waits=False), 2: BUSY}, [], [1]),
        ({0: WAITS, 1: WAITS, 2: WAITS}, [], []),
        ({0: BUSY, 1: RankSnapshot("step", 7, "other (train.py:3)", waits=False)}, [], []),
        ({}, [0, 1], []),
    ],
    ids=["busy", "silent", "behind", "elsewhere", "all wait", "two, each elsewhere", "nobody answers"],
)
def test_the_rank_that_is_not_in_the_collective(told, silent, ranks):
    assert blocking_ranks(told, silent) == ranks
