"""Hang detection, and the rank that the others wait for."""

import math

import pytest
from msgspec.structs import replace

from hpctrain.record_types import RankSnapshot
from hpctrain.supervisor.workers.hang_detection import HangDetector, HangInfo, PhaseLimits, blocking_ranks
from hpctrain.supervisor.workers.rank_monitor import describe_hang


def trained_detector(
    steps: int, seconds: float, ranks: int = 2, floor_s: float | None = 60.0
) -> HangDetector:
    """Return a detector after that many steps, each of that many seconds."""
    detector = HangDetector(PhaseLimits(floor_s), 0.0)
    for step in range(steps + 1):
        for rank in range(ranks):
            detector.on_heartbeat(rank, "step", step, step, step * seconds)
    return detector


@pytest.mark.parametrize(("step_s", "limit_s"), [(1.0, 60.0), (20.0, 200.0)], ids=["floor", "longest step"])
def test_hang_is_detected_after_a_limit_that_grows_with_the_longest_step(step_s, limit_s):
    detector, end = trained_detector(5, step_s), 5 * step_s
    assert detector.find_hang(end + limit_s - 1) is None
    assert detector.find_hang(end + limit_s + 1) == HangInfo(limit_s + 1, limit_s)


def test_phase_with_the_longest_limit_counts():
    detector = trained_detector(5, 1.0)
    detector.on_heartbeat(0, "save", 5, 6, 6.0)
    assert detector.find_hang(700.0) is None
    assert detector.find_hang(6.0 + 12 * 60.0 + 1.0) is not None


def test_last_phase_of_a_silent_rank_does_not_count():
    """A rank that holds Python's lock in its fifth step sent its last heartbeat before the first."""
    detector = HangDetector(PhaseLimits(60.0, {"load": 40.0}), 0.0)
    detector.on_heartbeat(1, "load", 0, 1, 0.0)
    for second in range(100):
        detector.on_heartbeat(0, "step", 5, 5, float(second))
        detector.on_message(0, float(second))
    overdue = detector.find_hang(99.0)
    assert overdue is not None
    assert overdue.limit_s == 60.0
    detector.on_message(1, 99.0)
    assert detector.find_hang(99.0) is None


def test_heartbeat_without_progress_does_not_prevent_a_hang():
    detector = trained_detector(5, 1.0)
    for second in range(6, 70):
        detector.on_heartbeat(0, "step", 5, 5, float(second))
        detector.on_heartbeat(1, "step", 5, 5, float(second))
    assert detector.find_hang(70.0) is not None


def test_busy_script_without_steps_hangs_after_twelve_times_the_limit():
    detector = HangDetector(PhaseLimits(60.0), 0.0)
    detector.on_heartbeat(0, "script", 5, 5, 0.0)
    for second in range(1, 800):
        detector.on_heartbeat(0, "script", 5, 5 + second, float(second))
    assert detector.find_hang(720.0) is None
    assert detector.find_hang(800.0).limit_s == 720.0


def test_idle_script_hangs_after_the_limit_and_evaluations_extend_step_gaps():
    detector = HangDetector(PhaseLimits(60.0), 0.0)
    detector.on_heartbeat(0, "script", 5, 5, 0.0)
    assert detector.find_hang(61.0).limit_s == 60.0
    for second in range(1, 200):
        detector.on_heartbeat(0, "script", 5, 5 + second, float(second))
    detector.on_heartbeat(0, "script", 6, 205, 200.0)
    assert detector.limits.limit_s("step gap") == 2000.0


def test_no_hang_is_detected_without_a_floor():
    assert trained_detector(5, 1.0, floor_s=None).find_hang(1e9) is None
    assert PhaseLimits(None).limit_s("step") == math.inf


def test_ranks_that_never_connect_hang_if_earlier_ranks_connected():
    first = HangDetector(PhaseLimits(60.0), 0.0)
    assert first.find_hang(1e9) is None
    first.on_heartbeat(0, "start", 0, 0, 50.0)
    second = HangDetector(first.limits, 1000.0)
    second.discount_pause(10.0)
    assert second.find_hang(1510.0) is None
    stuck = second.find_hang(1511.0)
    assert stuck is not None
    assert (stuck.seconds, stuck.limit_s) == (501.0, 500.0)
    assert describe_hang(stuck, {}, [], [], str, 2) == (
        "hung: no rank made progress for 501 s (limit 500 s); no rank has connected to the supervisor in "
        "this attempt"
    )


def test_suspended_job_does_not_hang():
    detector = trained_detector(5, 1.0)
    detector.discount_pause(1000.0)
    assert detector.find_hang(1060.0) is None


BUSY = RankSnapshot("step", 7, "training_step (train.py:12)", waits=False)
WAITS = RankSnapshot("step", 7, "backward (train.py:20)", waits=True)


@pytest.mark.parametrize(
    ("snapshots", "silent", "ranks"),
    [
        ({0: WAITS, 1: BUSY, 2: WAITS}, [], [1]),
        ({0: WAITS, 2: WAITS}, [1], [1]),
        ({0: WAITS, 1: RankSnapshot("step", 6, "elsewhere", waits=True), 2: WAITS}, [], [1]),
        ({0: BUSY, 1: RankSnapshot("step", 7, "other (train.py:3)", waits=False), 2: BUSY}, [], [1]),
        ({0: WAITS, 1: WAITS, 2: WAITS}, [], []),
        ({0: BUSY, 1: RankSnapshot("step", 7, "other (train.py:3)", waits=False)}, [], []),
        ({}, [0, 1], []),
        ({}, [0], [0]),
        ({0: BUSY}, [], [0]),
    ],
    ids=[
        *("busy", "silent", "behind", "elsewhere", "all wait", "two, each elsewhere", "nobody answers"),
        *("only rank does not answer", "only rank"),
    ],
)
def test_rank_outside_the_collective_is_found(snapshots, silent, ranks):
    assert blocking_ranks(snapshots, silent) == ranks


def test_process_group_that_does_not_form_names_the_address_and_the_missing_rank():
    stuck = HangInfo(301, 300)
    joining = RankSnapshot("join", 0, "main (train.py:3)", waits=True, rendezvous="n1:29500")
    text = describe_hang(stuck, {0: joining, 1: joining}, [], [], str, 3)
    assert "ranks 0-1 waiting for the process group at n1:29500; rank 2 not arrived" in text
    elsewhere = replace(joining, rendezvous="n1:29501")
    text = describe_hang(stuck, {0: joining, 1: elsewhere}, [], [], str, 2)
    assert text.endswith(
        "at n1:29500 and n1:29501. Set MASTER_ADDR and MASTER_PORT, or the init_method, equally on all ranks"
    )
