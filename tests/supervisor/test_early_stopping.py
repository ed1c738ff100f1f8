"""Early stopping of a trial: the supervisor compares the trial with the others."""

from __future__ import annotations

import queue

import pytest

from hpctrain.files import read_json_lines
from hpctrain.rundir import STOPPED_EARLY, RunDir
from hpctrain.supervisor import monitors
from hpctrain.supervisor.launch.job_step import StopRequested
from hpctrain.supervisor.monitors import EarlyStoppingMonitor
from hpctrain.supervisor.run_end import finish_run
from hpctrain.sweeps.stopping_rules import StoppingRule
from hpctrain.sweeps.sweep_record import SweepRecord


@pytest.fixture
def trials(tmp_path, monkeypatch) -> list[RunDir]:
    """Three trials of a sweep with ASHA; two have reported losses of 1 and 2 at step 10."""
    monkeypatch.setattr(monitors, "_TRIAL_INTERVAL_S", 0.01)
    array = RunDir(tmp_path / "sweep")
    trials = [array.task(number) for number in range(3)]
    for trial in trials:
        trial.path.mkdir(parents=True)
        trial.events.touch()
    rule = StoppingRule("asha", "loss", "min", 10, 3)
    array.sweep.write_text(SweepRecord(args=(), space={"lr": "0:3"}, folder="/", stopping=rule).text())
    for number in (0, 1):
        line = {"step": 10, "best": number + 1.0, "mean": number + 1.0}
        trials[number].storage.append(trials[number].early_stopping, line)
    return trials


def test_losing_trial_is_stopped_with_a_reason(trials):
    events: queue.SimpleQueue = queue.SimpleQueue()
    with EarlyStoppingMonitor(trials[2], events):
        for step in range(1, 12):
            trials[2].storage.append(trials[2].metrics, {"step": step, "loss": 5 - step / 10})
        request = events.get(timeout=120)
    assert request == StopRequested(
        "stopped early at step 10 by ASHA: 2 trials of 3 had a better loss than 4, and the best 1 continue"
    )
    assert trials[2].early_stop_reason() == request.reason
    assert finish_run(trials[2], "CANCELLED").code == 0
    end = list(read_json_lines(trials[2].events))[-1]
    assert (end["state"], end["note"]) == (STOPPED_EARLY, request.reason)
    # The user resumes the trial.
    with EarlyStoppingMonitor(trials[2], events), pytest.raises(queue.Empty):
        events.get(timeout=0.3)


def test_better_trial_continues_until_others_overtake_it(trials):
    events: queue.SimpleQueue = queue.SimpleQueue()
    with EarlyStoppingMonitor(trials[1], events):
        with pytest.raises(queue.Empty):
            events.get(timeout=0.3)
        trials[2].storage.append(trials[2].early_stopping, {"step": 10, "best": 0.5, "mean": 0.5})
        assert "by ASHA" in events.get(timeout=120).reason


def test_damaged_records_do_not_stop_a_trial(trials):
    events: queue.SimpleQueue = queue.SimpleQueue()
    for line in ("{", "{}", '{"step": "x", "best": 0, "mean": 0}', '{"step": 10, "best": [], "mean": 0}'):
        with trials[0].early_stopping.open("a") as file:
            file.write(line + "\n")
    with EarlyStoppingMonitor(trials[1], events), pytest.raises(queue.Empty):
        events.get(timeout=0.3)
    trials[0].array.sweep.write_text("{")
    with EarlyStoppingMonitor(trials[1], events), pytest.raises(queue.Empty):
        events.get(timeout=0.3)
