"""Sweeps on a real Slurm: preempted trials, a trial that crashes, and early stopping."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import SCRIPTS
from helpers.commands import environment, run_command
from helpers.training_runs import train_on_forked_ranks
from helpers.waiting import wait_for

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

pytestmark = [pytest.mark.long, pytest.mark.timeout(460)]

TRIAL = str(SCRIPTS / "train_trial.py")
SHAPE = ["--nodes=1", "--ntasks-per-node=1", "--cpus-per-task=8", "--standby-workers=never"]
RATES, SEEDS, STEPS = (0.01, 0.02, 0.03), range(8), 60


@pytest.fixture
def hpctrain(slurm, tmp_path) -> Callable[..., str]:
    variables = environment({**slurm.env, "OMP_NUM_THREADS": "1"})

    def call(*args: str) -> str:
        return run_command([sys.executable, "-m", "hpctrain", *args], variables, cwd=tmp_path).stdout

    return call


@pytest.fixture
def status(hpctrain) -> Callable[[], dict[str, Any]]:
    return lambda: json.loads(hpctrain("sweep", "status", "./s", "--json"))


def results(trial: RunDir) -> dict[int, dict[str, float]]:
    """Return the metrics of each step, from the attempt that trained it last."""
    lines = [json.loads(line) for line in trial.metrics.read_text().splitlines()]
    return {
        line["step"]: {name: value for name, value in line.items() if name in ("loss", "val_loss")}
        for line in lines
    }


def kinds(trial: RunDir) -> list[str]:
    return [event["kind"] for event in read_json_lines(trial.events)]


def preempt_trial(slurm: Any, sweep: RunDir, spared: set[str]) -> str:
    """Preempt a trial that trains its first attempt; return its name."""

    def training() -> RunDir | None:
        for trial in map(sweep.task, sweep.tasks()):
            is_spared = trial.path.name in spared or "finished" in kinds(trial)
            if not is_spared and trial.metrics.exists() and 3 < len(results(trial)) < STEPS // 2:
                return trial
        return None

    trial = wait_for(training, 200, "a trial to train")
    node = next(event["hosts"][0] for event in read_json_lines(trial.events) if event["kind"] == "started")
    urgent = ["sbatch", "--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null"]
    run_command([*urgent, "--wrap=sleep 1"], slurm.env)
    wait_for(lambda: "requeue" in kinds(trial), 60, f"the requeue of {trial}")
    return trial.path.name


def test_sweep_with_preemptions_and_a_crash_has_undisturbed_results(slurm, hpctrain, status, tmp_path):
    """Twenty-four trials on four nodes."""
    rates, seeds = ",".join(map(str, RATES)), f"0:{len(SEEDS)}"
    words = ["--over", f"lr={rates}", "--over", f"seed={seeds}", "--concurrent=4", "--run-dir=s", *SHAPE]
    assert "24 trials" in hpctrain("sweep", *words, TRIAL, "--steps", str(STEPS), "--step-s", "0.15")
    sweep = RunDir(tmp_path / "s")
    preempted: set[str] = set()
    for _ in range(2):
        preempted.add(preempt_trial(slurm, sweep, preempted))
    wait_for(lambda: status()["state"] == "FAILED", 400, "the end of the sweep", interval=2.0)
    assert status()["states"] == {"FAILED": 1, "COMPLETED": 23}
    crashed = len(SEEDS) * RATES.index(0.03) + 3
    for number in {0, 23, *(int(name.removeprefix("task-")) for name in preempted)}:
        trial = ["--lr", str(RATES[number // len(SEEDS)]), "--seed", str(number % len(SEEDS))]
        arguments = [*trial, "--steps", str(STEPS), "--step-s", "0"]
        path = tmp_path / f"reference-{number}"
        expected = results(train_on_forked_ranks(path, Path(TRIAL), arguments, ranks=1).dir)
        assert results(sweep.task(number)) == expected, number
        assert len(expected) == STEPS
    assert {name for name in preempted if "resumed" in kinds(RunDir(sweep.path / name))} == preempted
    text = hpctrain("sweep", "status", "./s")
    assert f"s/task-{crashed}: rank 0 on " in text
    assert "ValueError: lr 0.03 is too high for seed 3" in text
    best = json.loads(hpctrain("sweep", "best", "./s", "--json"))
    finals = {n: results(sweep.task(n))[STEPS]["val_loss"] for n in range(24) if n != crashed}
    assert best["best"]["value"] <= min(finals.values())
    assert Path(best["best"]["checkpoint"]).is_dir()


def test_early_stopping_saves_a_third_of_the_steps(hpctrain, status):
    rates = [0.1, 0.03, 0.01, 0.003, 0.001, 3e-4, 1e-4, 3e-5, 1e-5]
    words = ["--over", f"lr={','.join(map(str, rates))}", "--concurrent=4", "--run-dir=s", *SHAPE]
    rule = ["--metric=val_loss", "--stop-early=asha", "--min-steps=10"]
    hpctrain("sweep", *words, *rule, TRIAL, "--steps", "100", "--step-s", "0.15")
    wait_for(lambda: status()["state"] == "COMPLETED", 400, "the end of the sweep", interval=2.0)
    trials = status()["trials"]
    states = {trial["run_id"]: trial["state"] for trial in trials}
    assert (trials[0]["hparams"]["lr"], trials[0]["state"], trials[0]["step"]) == (0.1, "COMPLETED", 100)
    assert set(states.values()) == {"COMPLETED", "STOPPED_EARLY"}
    assert sum(trial["step"] for trial in trials) < 2 / 3 * 100 * len(rates), trials
    stopped = next(trial for trial in trials if trial["state"] == "STOPPED_EARLY")
    assert "by ASHA" in stopped["note"]
    assert stopped["checkpoint"], "a stopped trial has saved its state"
