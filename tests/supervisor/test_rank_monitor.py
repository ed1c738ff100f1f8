"""The rank monitor with a fake step: launchers that stay after their ranks."""

import queue

import pytest
from helpers.waiting import wait_for
from msgspec.structs import replace

from hpctrain.errors import SchedulerError
from hpctrain.files import read_json_lines
from hpctrain.record_types import RankMessage
from hpctrain.rundir import RunDir
from hpctrain.supervisor.launch.job_step import LauncherStuck
from hpctrain.supervisor.workers import rank_monitor as module
from hpctrain.supervisor.workers.hang_detection import PhaseLimits
from hpctrain.supervisor.workers.rank_monitor import RankMonitor

BEAT = RankMessage(phase="step", step=1, beats=1, timed=(1, 1))


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


@pytest.fixture
def clock(monkeypatch):
    """The monotonic clock, and the system clock, which is ahead of it."""
    now = [1000.0]
    monkeypatch.setattr(module.system, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.system, "time", lambda: 1e9 + now[0])
    return now


def make_monitor(tmp_path, limits, sent=None):
    events, send = queue.SimpleQueue(), (lambda message: 0) if sent is None else sent.append
    return RankMonitor(RunDir(tmp_path), 0, FakeStep(False), send, events.put, limits, lambda rank: "n1", 2)


def beat(step, compute_s=0.0, **fields):
    times = {"spent": (0.0, compute_s, 0.0), "timed": (step, step)}
    return replace(BEAT, step=step, beats=step, **times, **fields)


def test_pause_of_the_job_is_neither_a_hang_nor_a_long_step(tmp_path, clock):
    limits, sent = PhaseLimits(10), []
    monitor = make_monitor(tmp_path, limits, sent)
    for step in range(1, 5):
        clock[0] += 1
        for rank in range(2):
            monitor.on_message(rank, beat(step))
        monitor.on_tick()
    clock[0] += 3600
    # Messages are read before the check.
    monitor.on_message(0, beat(5))
    monitor.on_tick()
    assert limits.max_duration_s["step"] == pytest.approx(1.0)
    for _ in range(9):
        clock[0] += 1
        monitor.on_tick()
    assert sent == []


@pytest.mark.parametrize("supervisor_too", [True, False])
def test_pause_of_ranks_is_recorded_once_and_makes_no_straggler(tmp_path, clock, supervisor_too):
    limits, compute_s = PhaseLimits(30), [0.0, 0.0]
    monitor = make_monitor(tmp_path, limits)

    def train(steps):
        for step in steps:
            clock[0] += 1
            for rank in range(2):
                compute_s[rank] += 0.1
                monitor.on_message(rank, beat(step, compute_s[rank]))
            monitor.on_tick()

    train(range(1, 10))
    for _ in range(1 if supervisor_too else 25):
        clock[0] += 25 if supervisor_too else 1
        if not supervisor_too:
            monitor.on_message(1, RankMessage())
            monitor.on_tick()
    compute_s[0] += 25.0
    for rank in (0, 1) if supervisor_too else (0,):
        monitor.on_message(rank, beat(10, compute_s[rank], paused=(25.0, 25.0)))
    train(range(11, 60))
    events = list(read_json_lines(RunDir(tmp_path).events))
    assert [(event["kind"], event["rank"], event["seconds"]) for event in events] == [("paused", 0, 25.0)]
    assert limits.max_duration_s["step"] < 2.0
