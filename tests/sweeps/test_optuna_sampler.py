"""Trials chosen by Optuna: values in the search space, which depend on the results of finished trials."""

from __future__ import annotations

import json
import math
import os
import statistics
from concurrent.futures import ThreadPoolExecutor

import pytest

from hpctrain.errors import UserError
from hpctrain.rundir import RunDir
from hpctrain.sweeps.optuna_sampler import choose_values
from hpctrain.sweeps.search_space import TrialValues
from hpctrain.sweeps.sweep_record import SweepRecord

optuna = pytest.importorskip("optuna")

SPACE = {"lr": "log:1e-5..1e-1", "layers": "1..8", "name": "adam,sgd"}


def sweep(**fields) -> SweepRecord:
    given = {"args": (), "space": SPACE, "folder": "/", "sampler": "optuna", "metric": "val_loss"}
    return SweepRecord(**given | fields)


def trial_of(array: RunDir, number: int) -> RunDir:
    trial = array.task(number)
    trial.path.mkdir(parents=True)
    return trial


def finish(trial: RunDir, value: float, state: str = "COMPLETED") -> None:
    trial.storage.append(trial.metrics, {"step": 1, "val_loss": value})
    trial.log_event("finished", 0, state=state)


def loss(values: TrialValues) -> float:
    """Lowest at lr = 0.001 and three layers."""
    return abs(math.log10(float(values["lr"])) + 3) + abs(int(values["layers"]) - 3) / 8


def study(array: RunDir):
    backend = optuna.storages.journal.JournalFileBackend(str(array.optuna_journal))
    return optuna.load_study(study_name="sweep", storage=optuna.storages.JournalStorage(backend))


@pytest.mark.slow
def test_trials_approach_the_optimum(tmp_path):
    array = RunDir(tmp_path / "sweep")
    losses = []
    for number in range(40):
        trial = trial_of(array, number)
        values = choose_values(trial, sweep())
        assert 1e-5 <= float(values["lr"]) <= 1e-1
        assert values["layers"] in map(str, range(1, 9))
        assert values["name"] in ("adam", "sgd")
        losses.append(loss(values))
        finish(trial, losses[-1])
    assert statistics.mean(losses[20:]) < 0.6 * statistics.mean(losses[:10])


def test_others_cannot_write_the_records(tmp_path):
    trial = trial_of(RunDir(tmp_path / "sweep"), 0)
    before = os.umask(0)
    try:
        choose_values(trial, sweep())
    finally:
        os.umask(before)
    for path in (trial.optuna_trial, trial.array.optuna_journal):
        assert path.stat().st_mode & 0o022 == 0


def test_values_are_chosen_once(tmp_path):
    trial = trial_of(RunDir(tmp_path / "sweep"), 0)
    first = choose_values(trial, sweep())
    assert choose_values(trial, sweep(space={"lr": "1,2"})) == first
    assert len(study(trial.array).trials) == 1
    trial.optuna_trial.write_text('{"number": 0}')
    with pytest.raises(UserError, match="Cannot read the trial's values"):
        choose_values(trial, sweep())


def test_two_jobs_of_a_trial_use_the_same_values(tmp_path):
    trial = trial_of(RunDir(tmp_path / "sweep"), 0)
    choose_values(trial_of(trial.array, 1), sweep())
    with ThreadPoolExecutor(4) as pool:
        chosen = list(pool.map(lambda _: choose_values(trial, sweep()), range(4)))
    assert chosen == [chosen[0]] * 4


def test_trials_that_start_together_add_the_same_results(tmp_path):
    array = RunDir(tmp_path / "sweep")
    trials = [trial_of(array, number) for number in range(16)]
    for number, trial in enumerate(trials[:8]):
        choose_values(trial, sweep())
        finish(trial, float(number))
    with ThreadPoolExecutor(8) as pool:
        chosen = list(pool.map(lambda trial: choose_values(trial, sweep()), trials[8:]))
    assert len(chosen) == 8
    assert sorted(one.value for one in study(array).trials if one.value is not None) == [
        *map(float, range(8))
    ]


def test_incomplete_line_of_the_journal_is_removed(tmp_path):
    array = RunDir(tmp_path / "sweep")
    first, second = trial_of(array, 0), trial_of(array, 1)
    choose_values(first, sweep())
    with open(array.optuna_journal, "ab") as file:
        file.write(b'{"op_code": 5, "work')  # as if the disk had been full
    choose_values(second, sweep())
    assert len(study(array).trials) == 2


def test_only_finished_trials_have_results(tmp_path):
    array = RunDir(tmp_path / "sweep")
    trials = [trial_of(array, number) for number in range(6)]
    for trial in trials[:-1]:
        choose_values(trial, sweep(mode="max"))
    finish(trials[0], 3.0)
    finish(trials[1], 1.0, "STOPPED_EARLY")
    finish(trials[2], 9.0, "FAILED")
    trials[3].storage.append(trials[3].metrics, {"step": 1, "val_loss": 5.0})
    trials[4].log_event("finished", 0, state="COMPLETED")
    choose_values(trials[5], sweep(mode="max"))
    number = {trial: json.loads(trial.optuna_trial.read_text())["number"] for trial in trials[:2]}
    assert {one.number: one.value for one in study(array).trials if one.value is not None} == {
        number[trials[0]]: 3.0,
        number[trials[1]]: 1.0,
    }
    assert study(array).best_value == 3.0
