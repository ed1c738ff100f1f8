"""One curve in every tracker after kills of rank 0 and of its loggers; and hanging trackers."""

import json
import os
import signal
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers import tracker_files
from helpers.commands import run_command
from helpers.processes import assert_no_process_left, run_processes
from helpers.waiting import wait_for
from test_loggers import CLIENTS, OFFLINE

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.telemetry.loggers.dispatcher import load_state

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

SCRIPT = """
import time, torch, hpctrain
from torch.utils.data import TensorDataset

class Line(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.15)
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Hanging:
    name = "hanging"

    def start(self, run):
        return None

    def log(self, lines):
        time.sleep(600)

    def rewind(self, step):
        return False

    def finish(self, ending):
        pass

if "hanging" in LOGGERS:
    LOGGERS = ["csv", Hanging()]
x = torch.linspace(-1, 1, 320).unsqueeze(1)
trainer = hpctrain.Trainer(max_steps=LAST, global_batch_size=32, checkpoint_every=20, loggers=LOGGERS, seed=1)
trainer.fit(Line(), TensorDataset(x, 3 * x + 1))
"""
LAST = 300
#: Steps in flight when a logger is killed, twice here. wandb's own process writes in blocks of 32 KiB.
IN_FLIGHT = {"wandb": 150}
MAX_IN_FLIGHT = 70


def kill(run: RunDir, *, with_loggers: bool) -> None:
    for process in run_processes(run.path):
        is_rank_0 = "hpctrain.runtime.worker" in process.argv and process.environ["SLURM_PROCID"] == "0"
        is_logging = "hpctrain.telemetry.loggers.dispatcher" in process.argv
        if is_rank_0 or (with_loggers and is_logging):
            os.kill(process.pid, signal.SIGKILL)


def delivered(run: RunDir, loggers: list[str]) -> int:
    """Return the step that every logger has received."""
    return min(load_state(run.logger_state(name)).steps.get("loss", 0) for name in loggers)


def newest_attempt_and_step(run: RunDir) -> tuple[int, int]:
    *_, last = read_json_lines(run.metrics)
    return last["attempt"], last["step"]


def wait_for_step(run: RunDir, attempt: int, step: int) -> None:
    wait_for(
        lambda: run.metrics.exists() and newest_attempt_and_step(run) >= (attempt, step),
        90,
        f"step {step} of start {attempt}",
    )


def test_each_step_is_logged_once_after_kills_of_ranks_and_loggers(tmp_path):
    loggers = [name for name, package in CLIENTS.items() if find_spec(package)]
    run = submit(tmp_path, LAST, loggers)
    wait_for_step(run, 0, 70)
    kill(run, with_loggers=False)
    wait_for_step(run, 1, 90)
    wait_for(lambda: delivered(run, loggers) >= 75, 60, "the loggers of the second start")
    kill(run, with_loggers=True)
    hpctrain("wait", str(run.path))
    assert_no_process_left(run.path)
    records = list(read_json_lines(run.metrics))
    assert len(records) > LAST  # some steps were trained again
    losses = {record["step"]: record["loss"] for record in records}
    assert len(losses) == LAST
    for name in loggers:
        points = getattr(tracker_files, f"{name}_points")(run.path)
        values = {step: value for metric, step, value in points if metric == "loss"}
        repeated = {point: times for point, times in Counter(p[:2] for p in points).items() if times > 1}
        assert not repeated, (name, repeated)
        missing = sorted(set(losses) - set(values))
        assert len(missing) <= IN_FLIGHT.get(name, MAX_IN_FLIGHT), (name, missing)
        assert LAST in values, name
        assert values == {step: pytest.approx(losses[step], rel=1e-6) for step in values}, name


def test_hanging_tracker_delays_no_step_and_the_end_by_half_a_minute(tmp_path):
    run = submit(tmp_path, 40, ["hanging"])
    hpctrain("wait", str(run.path))
    assert_no_process_left(run.path)
    assert len(tracker_files.csv_points(run.path)) == 40
    assert "did not finish within 30 s" in run.rank_log(0, 0).read_text()
    assert json.loads(run.logger_state("hanging").read_text())["sending"]["loss"] > 0


def submit(tmp_path: Path, last_step: int, loggers: list[str]) -> RunDir:
    script, run = tmp_path / "train.py", RunDir(tmp_path / "run")
    script.write_text(f"LAST, LOGGERS = {last_step}, {loggers}\n" + SCRIPT)
    env_options = [word for name, value in OFFLINE.items() for word in ("--env", f"{name}={value}")]
    shape = ["--backend=local", "--ntasks-per-node=2", "--run-dir", str(run.path)]
    hpctrain("submit", *shape, *env_options, str(script))
    return run


def hpctrain(*args: str) -> None:
    run_command([sys.executable, "-m", "hpctrain", *args], timeout=200)
