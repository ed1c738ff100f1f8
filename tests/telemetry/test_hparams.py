"""Hyper-parameters of a run, and its best value."""

import sys
from argparse import Namespace
from dataclasses import dataclass

import pytest
from helpers.commands import run_command
from helpers.run_histories import started_run, write_run

from hpctrain.jobspec.redaction import REDACTED_TEXT
from hpctrain.rundir import RunDir
from hpctrain.telemetry.hparams import collect_hparams, merge_hparams, parse_hparams, plain_hparams
from hpctrain.telemetry.report.run_results import read_results


@pytest.mark.parametrize(
    ("args", "hparams"),
    [
        (["--lr", "1e-4", "--max-steps=300"], {"lr": 1e-4, "max_steps": 300}),
        (["--fast", "--name", "a b", "--scale", "-2"], {"fast": True, "name": "a b", "scale": -2}),
        (["model.lr=0.1", "+data=cifar", "++seed=1"], {"model.lr": 0.1, "data": "cifar", "seed": 1}),
        (["file.txt", "-n", "3", "--", "x"], {"n": 3}),
        (["--lr", "1", "--lr", "2"], {"lr": 2}),
        (["--run", "20261121093012345", "--big", "1e999"], {"run": "20261121093012345", "big": "1e999"}),
    ],
)
def test_arguments_are_parsed(args, hparams):
    assert parse_hparams(args) == hparams


@pytest.mark.parametrize(
    ("command", "hparams"),
    [
        ("bash -c a=b", {}),
        ("/bin/sh -euc a=b --lr 0.1", {"lr": 0.1}),
        ("python3.11 -c a=b --lr 0.1", {"lr": 0.1}),
        ("python train.py --lr 0.1", {"lr": 0.1}),
        ("trainer -c a.yaml", {"c": "a.yaml"}),
    ],
)
def test_program_in_an_argument_is_not_a_hyper_parameter(command, hparams):
    script, *args = command.split()
    assert merge_hparams({"program": "command", "script": script, "args": args}, {}) == hparams


def test_values_of_the_training_override_the_arguments():
    @dataclass
    class Model:
        width: int = 8

    given = {"optim": {"lr": 0.5, "betas": (0.9, 0.95)}, "none": None}
    found = collect_hparams(Namespace(width=4), Model(), given, args=["--width", "2", "--seed", "1"])
    assert found == {"width": 8, "seed": 1, "optim.lr": 0.5, "optim.betas": "(0.9, 0.95)", "none": None}


def test_overrides_and_configs_of_hydra_are_recorded():
    hydra = pytest.importorskip("hydra")
    from hydra.core.hydra_config import HydraConfig

    words = ["+model.lr=0.5", "+seed=3"]
    with hydra.initialize(config_path=None, version_base=None):
        config = hydra.compose(overrides=words, return_hydra_config=True)
    try:
        HydraConfig.instance().set_config(config)
        assert collect_hparams(args=["--seed", "1"]) == {"seed": 3, "model.lr": 0.5}
    finally:
        HydraConfig.instance().cfg = None
    assert plain_hparams(config.model) == {"lr": 0.5}


def test_secrets_are_not_recorded():
    args = ["--api-key", "x1", "--max-tokens", "5", "auth_token=x2", "url=https://me:x3@host"]
    recorded = collect_hparams({"password": "x4", "num_tokens": 7}, args=args)
    shown = merge_hparams({"args": args}, {"hparams": {"db.secret": "x5"}})
    for found in (recorded, shown):
        assert not any(f"x{n}" in str(found) for n in range(1, 6))
        assert found["max_tokens"] == 5
    assert recorded["password"] == REDACTED_TEXT
    assert recorded["num_tokens"] == 7


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((None, None), ("acc", "max", 0.9, 2, 3)),
        (("val_loss", None), ("val_loss", "min", 0.1, 3, 3)),
        (("loss", "max"), ("loss", "max", 1.0, 1, 3)),
        (("missing", None), None),
    ],
)
def test_best_value_and_its_checkpoint(tmp_path, asked, expected):
    """Step 2 has the best accuracy, but its checkpoint has been removed."""
    history = started_run()
    for step, acc in enumerate([0.1, 0.9, 0.5, 0.4], 1):
        history.steps(step, step, every=1, acc=acc, val_loss=abs(step - 3) + 0.1)
    run = write_run(tmp_path / "r", history)
    run.storage.append(run.environment, {"settings": {"monitor": "acc", "mode": "max"}})
    for step in (3, 4):
        run.checkpoint(step).mkdir(parents=True)
    best = read_results(run, *asked).best
    found = best and (best.metric, best.mode, best.value, best.step, best.checkpoint_step)
    assert found == expected
    assert best is None or best.checkpoint == str(run.checkpoint(best.checkpoint_step))


SCRIPT = """
import sys, torch
from torch.utils.data import TensorDataset
import hpctrain

class Line(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

data = TensorDataset(torch.ones(8, 1))
settings = {"hparams": {"model": {"width": 1}, "unset": None}, "loggers": ["tensorboard"]}
hpctrain.Trainer(max_steps=2, global_batch_size=4, run_dir="trained", **settings).fit(Line(), data)
with hpctrain.session(run_dir="looped", **settings) as session:
    model = torch.nn.Linear(1, 1)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in session.batches(data, global_batch_size=4, max_steps=2):
        session.backward(model(x).square().mean())
        optimizer.step()
"""


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.slow
def test_training_records_hparams_and_passes_them_to_loggers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    (tmp_path / "train.py").write_text(SCRIPT)
    run_command([sys.executable, "train.py", "--lr", "0.1"], cwd=tmp_path)
    for name in ("trained", "looped"):
        run = RunDir(tmp_path / name)
        assert read_results(run).hparams == {"lr": 0.1, "model.width": 1, "unset": None}
        events = EventAccumulator(str(run.path / "tensorboard"))
        events.Reload()
        content = events.PluginTagToContent("hparams")["_hparams_/session_start_info"]
        logged = HParamsPluginData.FromString(content).session_start_info.hparams
        assert {name: value.number_value for name, value in logged.items()} == {"lr": 0.1, "model.width": 1}


@pytest.mark.parametrize(
    ("metrics", "expected"), [(("acc", "lr"), "loss"), (("acc", "val_b", "val_a"), "val_a")]
)
def test_runs_are_not_ranked_by_metrics_of_unknown_direction(tmp_path, metrics, expected):
    history = started_run()
    history.steps(1, 3, every=1, **dict.fromkeys(metrics, 0.5))
    assert read_results(write_run(tmp_path / "r", history), None, None).best.metric == expected
