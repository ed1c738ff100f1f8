"""Loggers of a run that is stopped and resumed: one curve without repeated steps; and hanging trackers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.tracker_files import csv_points, tensorboard_points
from helpers.waiting import wait_for

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

pytestmark = pytest.mark.ranks

SCRIPT = """
import time, torch, hpctrain
from pathlib import Path
from torch.utils.data import TensorDataset

class Line(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        time.sleep(0.1)
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Own:
    name = "own"

    def start(self, run):
        self.file = run.folder / "own.txt"
        self.write(f"start {run.known} {run.config['global_batch_size']}")
        return run.known or "first"

    def write(self, text):
        with open(self.file, "a") as file:
            file.write(text + "\\n")

    def log(self, lines):
        if HANGS:
            time.sleep(600)
        for line in lines:
            self.write(f"{line.step} {line.values['loss']!r}")

    def rewind(self, step):
        return False

    def finish(self, ending):
        self.write(ending)

x = torch.linspace(-1, 1, 200).unsqueeze(1)
loggers = ["csv", "tensorboard", Own()]
trainer = hpctrain.Trainer(max_steps=40, global_batch_size=20, checkpoint_every=None, loggers=loggers)
trainer.fit(Line(), TensorDataset(x, 3 * x + 1))
"""


def submit(tmp_path: Path, *, hangs: bool) -> RunDir:
    script, run = tmp_path / "train.py", RunDir(tmp_path / "run")
    script.write_text(f"HANGS = {hangs}\n" + SCRIPT)
    shape = ["--backend=local", "--ntasks-per-node=2", "--run-dir", str(run.path)]
    hpctrain("submit", *shape, str(script))
    return run


def hpctrain(*args: str) -> None:
    run_command([sys.executable, "-m", "hpctrain", *args], timeout=110)


def steps(run: RunDir) -> list[int]:
    return [record["step"] for record in read_json_lines(run.metrics)]


@pytest.mark.long
def test_stopped_and_resumed_run_has_one_curve_everywhere(tmp_path):
    pytest.importorskip("tensorboard")
    run = submit(tmp_path, hangs=False)
    wait_for(lambda: len(steps(run)) >= 5, 60, "steps")
    hpctrain("requeue", str(run.path))
    hpctrain("wait", str(run.path))
    assert_no_process_left(run.path)
    losses = {("loss", record["step"]): record["loss"] for record in read_json_lines(run.metrics)}
    assert len(losses) == 40
    for points in (csv_points(run.path), tensorboard_points(run.path)):
        assert len(points) == 40
        values = {point[:2]: point[2] for point in points}
        assert values == {point: pytest.approx(loss, rel=1e-6) for point, loss in losses.items()}
    own_lines = (run.path / "own.txt").read_text().splitlines()
    markers = [line for line in own_lines if not line[0].isdigit()]
    assert markers == ["start None 20", "stopped", "start first 20", "completed"]
    assert [line for line in own_lines if line[0].isdigit()] == [
        f"{n} {loss!r}" for (_, n), loss in losses.items()
    ]
    first, second = read_json_lines(run.environment)
    assert (first["attempt"], second["attempt"]) == (0, 1)
    assert first["settings"]["global_batch_size"] == 20


@pytest.mark.long
def test_hanging_tracker_delays_no_step_and_the_end_by_half_a_minute(tmp_path):
    run = submit(tmp_path, hangs=True)
    hpctrain("wait", str(run.path))
    assert_no_process_left(run.path)
    assert len(csv_points(run.path)) == 40
    assert "did not finish within 30 s" in run.rank_log(0, 0).read_text()
    assert json.loads(run.logger_state("own").read_text())["sending"]["loss"] > 0
