"""A tracker that hangs delays neither a step nor, by more than half a minute, the end of the run."""

import json

import pytest
from helpers.processes import assert_no_process_left
from helpers.tracker_files import csv_points
from helpers.training_runs import submit_script

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

x = torch.linspace(-1, 1, 320).unsqueeze(1)
trainer = hpctrain.Trainer(max_steps=40, global_batch_size=32, loggers=["csv", Hanging()], seed=1)
trainer.fit(Line(), TensorDataset(x, 3 * x + 1))
"""


def test_hanging_tracker_delays_no_step_and_the_end_by_half_a_minute(tmp_path):
    run = submit_script(tmp_path, SCRIPT, options=["--backend=local", "--ntasks-per-node=2"])
    assert run.wait() == 0
    assert_no_process_left(run.path)
    assert len(csv_points(run.path)) == 40
    assert "did not finish within 30 s" in run.dir.rank_log(0, 0).read_text()
    assert json.loads(run.dir.logger_state("hanging").read_text())["sending"]["loss"] > 0
