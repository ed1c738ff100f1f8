"""The rank monitor with a fake step: launchers that stay after their ranks."""

from __future__ import annotations

import queue

import pytest
from helpers.waiting import wait_for

from hpctrain.errors import SchedulerError
from hpctrain.rundir import RunDir
from hpctrain.supervisor.job_control.local import LocalJobControl
from hpctrain.supervisor.launch.job_step import LauncherStuck, StepEnded
from hpctrain.supervisor.policy.outcome import AttemptOutcome
from hpctrain.supervisor.workers import rank_monitor as module
from hpctrain.supervisor.workers.attempt_monitor import AttemptMonitor
from hpctrain.supervisor.workers.hang_detection import PhaseLimits
from hpctrain.supervisor.workers.rank_monitor import RankMonitor

BEAT = {"phase": "step", "step": 1, "beats": 1, "spent": [0, 0, 0], "modules": [], "changed": []}


class FakeStep:
    def __init__(self, answer):
        self.answer, self.asked = answer, 0

    def is_over(self):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def run_monitor(tmp_path, monkeypatch):
    """A monitor whose two ranks have connected and disconnected; it returns the step and the events."""
    monkeypatch.setattr(module, "_LAUNCHER_TIMEOUT_S", 0.0)

    def run_monitor(answer, leave=(0, 1)):
        step, events = FakeStep(answer), queue.SimpleQueue()
        limits = PhaseLimits(None)
        monitor = RankMonitor(
            RunDir(tmp_path), 0, step, lambda message: 0, events.put, limits, lambda rank: "n1", 2
        )
        for rank in range(2):
            monitor.on_message(rank, BEAT)
        for rank in leave:
            monitor.on_disconnect(rank)
        monitor.on_tick()
        return step, events

    return run_monitor


def test_stuck_launcher_of_an_ended_step_is_reported(run_monitor):
    _, events = run_monitor(True)
    assert events.get(timeout=120) == LauncherStuck()


@pytest.mark.parametrize("answer", [False, SchedulerError("out of reach")], ids=["goes on", "unknown"])
def test_running_step_is_left_alone(run_monitor, answer):
    step, events = run_monitor(answer)
    wait_for(lambda: step.asked, 5, "the question")
    assert events.empty()


def test_launcher_is_not_queried_while_a_rank_is_connected(run_monitor):
    step, events = run_monitor(True, leave=(0,))
    assert (step.asked, events.empty()) == (0, True)


def test_stuck_launcher_is_killed_and_the_attempt_has_failed():
    events = queue.SimpleQueue()

    class Stuck:
        def kill(self):
            events.put(StepEnded(143))

    class Local(LocalJobControl):
        def __init__(self):
            self._limit_s = None

    events.put(LauncherStuck())
    watch = AttemptMonitor(events=events, job_control=Local(), ends_at=None, stop_before_limit_s=1.0)
    assert watch.wait(Stuck()) is AttemptOutcome.FAILED
