"""What follows from what the ranks say and do not say, with a step that only pretends."""

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


class PretendStep:
    def __init__(self, answer):
        self.answer, self.asked = answer, 0

    def is_over(self):
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def heard(tmp_path, monkeypatch):
    """A contact whose two ranks have come and gone, the step's answer and the events."""
    monkeypatch.setattr(module, "_LAUNCHER_TIMEOUT_S", 0.0)

    def heard(answer, leave=(0, 1)):
        step, events = PretendStep(answer), queue.SimpleQueue()
        limits = PhaseLimits(None)
        contact = RankMonitor(
            RunDir(tmp_path), 0, step, lambda message: 0, events.put, limits, lambda rank: "n1", 2
        )
        for rank in range(2):
            contact.on_message(rank, BEAT)
        for rank in leave:
            contact.on_disconnect(rank)
        contact.on_tick()
        return step, events

    return heard


def test_ranks_that_have_left_a_step_that_is_over_are_not_waited_for(heard):
    _, events = heard(True)
    assert events.get(timeout=5) == LauncherStuck()


@pytest.mark.parametrize("answer", [False, SchedulerError("out of reach")], ids=["goes on", "unknown"])
def test_a_step_that_goes_on_is_left_alone(heard, answer):
    step, events = heard(answer)
    wait_for(lambda: step.asked, 5, "the question")
    assert events.empty()


def test_nobody_is_asked_as_long_as_a_rank_is_there(heard):
    step, events = heard(True, leave=(0,))
    assert (step.asked, events.empty()) == (0, True)


def test_the_launcher_of_such_a_step_is_ended_and_the_attempt_has_failed():
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
