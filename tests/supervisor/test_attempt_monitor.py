"""The attempt monitor with a fake step: reactions to exits, stops and missing ends."""

import queue
import signal
import time

import pytest
from helpers.run_histories import make_spec
from helpers.waiting import slowness

from hpctrain.errors import SchedulerError
from hpctrain.rundir import RunDir
from hpctrain.slurm.srun_step import StepEnded, TaskExit
from hpctrain.supervisor.job_control import LocalJobControl, SlurmJobControl
from hpctrain.supervisor.launch.job_step import (
    HangDetected,
    LauncherStuck,
    RankSignalled,
    SignalReceived,
    StopRequested,
)
from hpctrain.supervisor.workers import attempt_monitor
from hpctrain.supervisor.workers.attempt_monitor import AttemptMonitor, AttemptOutcome


class FakeStep:
    """Records its signals; ends when killed, unless it is stubborn."""

    def __init__(self, events, stubborn=False):
        self.events, self.stubborn = events, stubborn
        self.signals: list[signal.Signals] = []
        self.killed = False

    def signal(self, number):
        self.signals.append(number)

    def kill(self):
        self.killed = True
        if not self.stubborn:
            self.events.put(StepEnded(137))

    def close(self):
        pass


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch):
    for name in ("_FAILURE_GRACE_S", "_EXIT_GRACE_S", "STOP_GRACE_S", "CANCEL_GRACE_S", "_KILL_LIMIT_S"):
        monkeypatch.setattr(attempt_monitor, name, 0.05)


class Local(LocalJobControl):
    def __init__(self):
        self._limit_s = None


def monitor(*past_events, job=None, stubborn=False, ends_in=None, lead=0.1, **options):
    events = queue.SimpleQueue()
    for event in past_events:
        events.put(event)
    step = FakeStep(events, stubborn)
    ends_at = None if ends_in is None else time.monotonic() + ends_in
    attempt = AttemptMonitor(
        events=events, job_control=job or Local(), ends_at=ends_at, stop_before_limit_s=lead, **options
    )
    return attempt.wait(step), step, attempt


TERM, USR2 = signal.SIGTERM, signal.SIGUSR2


@pytest.mark.parametrize(
    ("events", "options", "outcome", "signals", "is_killed"),
    [
        ([TaskExit(0, 0), TaskExit(1, 0), StepEnded(0)], {}, AttemptOutcome.DONE, [], False),
        ([TaskExit(3, None, signal.SIGKILL)], {}, AttemptOutcome.FAILED, [], True),
        ([TaskExit(0, 75)], {}, AttemptOutcome.STOPPED, [], True),
        ([StepEnded(1, "srun: error: Unable to create step")], {}, AttemptOutcome.NOT_STARTED, [], False),
        ([SignalReceived(USR2)], {}, AttemptOutcome.STOPPED, [TERM], True),
        ([StopRequested("x"), TaskExit(0, 75), StepEnded(75)], {}, AttemptOutcome.STOPPED, [TERM], False),
        ([StopRequested("x")], {}, AttemptOutcome.STOPPED, [TERM], True),
        ([RankSignalled(1, "SIGTERM"), HangDetected("hung", 1, "n1")], {}, AttemptOutcome.STOPPED, [], True),
        ([HangDetected("hung", 1, "n1")], {}, AttemptOutcome.FAILED, [], True),
        ([LauncherStuck()], {}, AttemptOutcome.FAILED, [], True),
        ([], {"ends_in": 0.3, "lead": 0.2}, AttemptOutcome.OUT_OF_TIME, [USR2], True),
    ],
)
def test_outcome_follows_from_the_events(events, options, outcome, signals, is_killed):
    result, step, _ = monitor(*events, **options)
    assert (result, step.signals, step.killed) == (outcome, signals, is_killed)


@pytest.mark.parametrize(
    "stop", [SignalReceived(signal.SIGTERM), RankSignalled(1, "SIGTERM"), StopRequested("x"), TaskExit(0, 75)]
)
def test_a_failure_after_a_stop_request_is_part_of_the_stop(stop):
    aborted = TaskExit(1, None, signal.SIGABRT)
    assert monitor(stop, aborted, StepEnded(1))[2].is_stopping
    assert not monitor(aborted, stop, StepEnded(1))[2].is_stopping
    assert not monitor(aborted, StepEnded(1))[2].is_stopping


def replay(monkeypatch, script):
    """Handle events in virtual time; a number is the time until the next one."""
    now = [100.0]
    monkeypatch.setattr(attempt_monitor.system, "monotonic", lambda: now[0])

    class Events:
        def get(self, timeout):
            event = script.pop(0)
            if not isinstance(event, float):
                return event
            now[0] += event
            raise queue.Empty

    step = FakeStep(queue.SimpleQueue())
    attempt = AttemptMonitor(events=Events(), job_control=Local(), ends_at=None, stop_before_limit_s=120.0)
    return attempt.wait(step), step, attempt


@pytest.mark.parametrize(
    ("waits", "is_stopping"),
    [([10.0] * 10, True), ([10.0] * 19, False), ([10.0, 3600.0, 10.0], True)],
    ids=["within the grace time", "later", "after a pause of the job"],
)
def test_failure_long_after_a_signal_is_not_part_of_a_stop(monkeypatch, waits, is_stopping):
    """The script may save on a signal, and continue its training."""
    killed = TaskExit(1, None, signal.SIGKILL)
    script = [RankSignalled(1, "SIGUSR2"), *waits, killed, StepEnded(137)]
    assert replay(monkeypatch, script)[2].is_stopping is is_stopping


def test_second_cancel_kills_unresponsive_ranks(monkeypatch):
    monkeypatch.setattr(attempt_monitor, "CANCEL_GRACE_S", 60.0)
    outcome, step, _ = monitor(SignalReceived(signal.SIGTERM), SignalReceived(signal.SIGTERM))
    assert step.signals == [signal.SIGTERM]
    assert step.killed
    assert outcome is AttemptOutcome.STOPPED


def test_signal_sent_by_slurm_is_not_forwarded(tmp_path):
    job = SlurmJobControl(RunDir(tmp_path), make_spec(), {"SLURM_JOB_ID": "1"})
    outcome, step, attempt = monitor(SignalReceived(signal.SIGTERM), TaskExit(0, 75), StepEnded(75), job=job)
    assert step.signals == []
    assert not step.killed
    assert outcome is AttemptOutcome.STOPPED
    assert attempt.signals == [signal.SIGTERM]


def test_unreachable_controller_before_the_time_limit_does_not_fail_the_run(monkeypatch, caplog):
    def unreachable(self, number):
        raise SchedulerError("squeue says: Unable to contact slurm controller")

    monkeypatch.setattr(FakeStep, "signal", unreachable)
    outcome, _, _ = monitor(TaskExit(0, 75), ends_in=5.0, lead=10.0)
    assert outcome is AttemptOutcome.STOPPED
    assert "cannot signal the ranks: squeue says" in caplog.text


def test_step_that_survives_its_kill_is_an_error():
    with pytest.raises(TimeoutError, match="still running"):
        monitor(TaskExit(0, 1), stubborn=True)


def test_ranks_are_killed_in_time_for_a_requeue(monkeypatch):
    monkeypatch.setattr(attempt_monitor, "_EXIT_GRACE_S", 60.0)
    monkeypatch.setattr(attempt_monitor, "_REQUEUE_S", 12.0)
    monkeypatch.setattr(attempt_monitor, "_MIN_EXIT_GRACE_S", 0.05)

    queries = []

    class Slurm(Local):
        def seconds_left(self):
            queries.append(time.monotonic())
            return 12.1

    start = time.monotonic()
    outcome, step, _ = monitor(*(TaskExit(rank, 75) for rank in range(8)), job=Slurm())
    assert (outcome, step.killed) == (AttemptOutcome.STOPPED, True)
    assert len(queries) == 1, "with many ranks, a query for each would delay the requeue"
    assert time.monotonic() - start < 40 * slowness()


def test_pause_of_the_job_extends_the_time_to_stop(monkeypatch):
    monkeypatch.setattr(attempt_monitor, "STOP_GRACE_S", 30.0)
    stops = [TaskExit(0, 75), TaskExit(1, 75), StepEnded(75)]
    outcome, step, _ = replay(monkeypatch, [SignalReceived(signal.SIGUSR2), 5.0, 3600.0, 8.0, *stops])
    assert outcome is AttemptOutcome.STOPPED
    assert not step.killed
