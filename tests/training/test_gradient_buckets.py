"""Gradient buckets: their size, and their record in the run."""

import json
import sys

import pytest
from helpers.commands import run_command

import hpctrain
from hpctrain.errors import UserError
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

SCRIPT = """
import gc, json, os, torch, hpctrain
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

class Wide(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])

    def training_step(self, batch, batch_idx):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Look(hpctrain.Callback):
    def on_fit_end(self, trainer, module):
        (ddp,) = [one for one in gc.get_objects() if type(one) is DistributedDataParallel]
        sizes = ddp._get_ddp_logging_data()["rebuilt_bucket_sizes"]
        Path(os.environ["HPCTRAIN_RUN_DIR"], "sizes").write_text(f"[{sizes}]")

trainer = hpctrain.Trainer(max_steps=5, global_batch_size=8, bucket_cap_mb=0.6, callbacks=[Look()])
trainer.fit(Wide(), TensorDataset(torch.randn(64, 256)))
"""


@pytest.mark.long
@pytest.mark.ranks
def test_gradients_are_sent_in_buckets_of_the_requested_size(tmp_path):
    script, run = tmp_path / "train.py", RunDir(tmp_path / "run")
    script.write_text(SCRIPT)
    args = ["submit", "--backend=local", "--ntasks-per-node=2", "--run-dir", run.path, "--follow", script]
    run_command([sys.executable, "-m", "hpctrain", *args], timeout=110)
    sizes = json.loads((run.path / "sizes").read_text())
    (environment_record,) = read_json_lines(run.environment)
    assert len(sizes) > 2
    assert (environment_record["gradient_buckets"], environment_record["gradient_bytes"]) == (
        len(sizes),
        sum(sizes),
    )
    assert environment_record["settings"]["bucket_cap_mb"] == 0.6
    spent = [record["spent"] for record in read_json_lines(run.metrics)]
    assert sum(times["communication"] for times in spent) > 0
    assert all(sum(times.values()) - times["all"] <= times["all"] + 1e-5 for times in spent)


@pytest.mark.parametrize("strategy", ["zero3", "pipeline", "dp"])
def test_strategies_without_buckets_refuse_bucket_cap_mb(strategy):
    with pytest.raises(UserError, match=r"bucket_cap_mb is 1, but strategy is .*applies only to"):
        hpctrain.Trainer(max_steps=1, strategy=strategy, bucket_cap_mb=1)
