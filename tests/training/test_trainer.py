"""The Trainer in real processes: alone, and on several ranks under torchrun."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SCRIPTS
from helpers.fork_server import run_forked

import hpctrain
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

#: Value of `CUDA_VISIBLE_DEVICES`; the GPU tests set it.
VISIBLE_GPUS = ""
SMALL = SCRIPTS / "train_small.py"


def train(run: Path, *args: str, ranks: int = 1) -> dict:
    """Train `train_small.py` to its end."""
    return run_script(SMALL, run, *args, ranks=ranks)


def run_script(script: Path, run: Path, *args: object, ranks: int = 1) -> Any:
    """Run a script to its end and return its last output."""
    printed = run_forked(script, [str(arg) for arg in args], variables(run), ranks=ranks)
    return json.loads(printed.splitlines()[-1])


def variables(run: Path) -> dict[str, str]:
    """Return the environment; the last bit of a result depends on the number of threads, among others."""
    return {
        "HPCTRAIN_RUN_DIR": str(run),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_VISIBLE_DEVICES": VISIBLE_GPUS,
    }


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_json_lines(RunDir(run).metrics)}


@pytest.mark.extended
@pytest.mark.ranks
def test_four_ranks_resumed_in_mid_epoch_equal_the_undisturbed_run(tmp_path):
    # A batch of 32 is shared evenly; the epoch's last one of 13 is not.
    uninterrupted = train(tmp_path / "whole", "12", ranks=4)
    for last_step in ("5", "12"):
        resumed = train(tmp_path / "parts", last_step, ranks=4)
    assert resumed == uninterrupted
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


@pytest.mark.ranks
def test_any_number_of_ranks_gives_equal_losses_and_metrics(tmp_path):
    one = train(tmp_path / "1", "8", "norm=false")
    three_ranks = train(tmp_path / "3", "8", "norm=false", ranks=3)
    assert list(losses(tmp_path / "3").values()) == pytest.approx(
        list(losses(tmp_path / "1").values()), rel=1e-5
    )
    assert three_ranks["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
    assert three_ranks["checksum"] == pytest.approx(one["checksum"], rel=1e-4)
    # One rank writes a checkpoint, and three continue from it.
    train(tmp_path / "mixed", "5", "norm=false")
    mixed = train(tmp_path / "mixed", "8", "norm=false", ranks=3)
    assert mixed["checksum"] == pytest.approx(one["checksum"], rel=1e-4)


@pytest.mark.ranks
def test_log_every_limits_the_logged_steps(tmp_path):
    train(tmp_path, "7", "log_every=3", "validate_every=null")
    assert list(losses(tmp_path)) == [3, 4, 6, 7]  # 4 and 7 have a checkpoint


class Tiny(hpctrain.Module):
    def __init__(self, output=None, optimizer=None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.output, self.optimizer = output, optimizer

    def training_step(self, batch, batch_idx):
        return self.output(self.weight) if self.output else (self.weight - batch).pow(2).mean()

    def configure_optimizers(self):
        return self.optimizer if self.optimizer is not None else torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, *, data=(1.0, 2.0, 3.0, 4.0), run_dir=None, max_steps=2, **settings):
    trainer = hpctrain.Trainer(max_steps=max_steps, global_batch_size=2, run_dir=run_dir, **settings)
    trainer.fit(module, [torch.tensor([x]) for x in data])
    return trainer


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "max_steps is None and max_epochs is None"),
        ({"max_steps": 1, "max_epochs": 1}, "Set exactly one of them"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"max_steps": 1, "global_batch_size": -2}, "global_batch_size is -2"),
        ({"max_steps": 1, "strategy": "dpd"}, "strategy is 'dpd', but must be one of 'ddp'"),
        ({"max_steps": 1, "precision": "fp8"}, "precision is 'fp8', but must be one of '32', 'bf16-mixed'"),
        ({"max_steps": 1, "precision": "apex"}, "Use PyTorch's built-in mixed precision instead: '16-mixed'"),
        ({"max_steps": 1, "checkpoint_every": "often"}, "checkpoint_every is 'often'"),
        ({"max_steps": 1, "num_workers": -1}, "num_workers is -1"),
        ({"max_steps": 1, "dataloader_timeout_s": 0}, "dataloader_timeout_s is 0"),
        ({"max_steps": 1, "gradient_clip_value": "1"}, "gradient_clip_value is '1'"),
        ({"max_steps": 1, "lr_scaling": "cubic"}, "lr_scaling is 'cubic'"),
        ({"max_steps": 1, "callbacks": [print]}, "callbacks contains"),
        ({"max_steps": 1, "seed": 2**70}, "seed is "),
        ({"max_steps": 1, "compile": "max"}, "compile is 'max'"),
        ({"max_steps": 1, "compile": True, "recompute": ["body"]}, "Set only one of them"),
        *(
            ({"max_steps": 1, name: True}, f"{name} is True")
            for name in ("global_batch_size", "micro_batch_size", "keep_best", "devices", "bucket_cap_mb")
        ),
    ],
)
def test_invalid_settings_are_refused_at_once(settings, message):
    with pytest.raises(hpctrain.UserError, match=re.escape(message)):
        hpctrain.Trainer(**settings)


def test_metric_dependent_schedule_is_refused_with_an_alternative():
    module = Tiny()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.optimizer = optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(hpctrain.UserError, match=r"in the on_validation_end\(\) of a callback"):
        fit(module)


def test_run_with_special_files_as_records_does_not_start(tmp_path):
    os.mkfifo(tmp_path / "events.jsonl")
    with pytest.raises(hpctrain.UserError, match=r"events.jsonl is not a regular file"):
        fit(Tiny(), run_dir=tmp_path)


def test_run_is_not_resumed_with_another_sample_order(tmp_path):
    fit(Tiny(), run_dir=tmp_path)
    with pytest.raises(hpctrain.UserError, match=r"'num_samples': 4.*'num_samples': 3"):
        fit(Tiny(), data=(1.0, 2.0, 3.0), run_dir=tmp_path, max_steps=4)
    with pytest.raises(hpctrain.UserError, match=r"'seed': 0.*'seed': 5"):
        fit(Tiny(), run_dir=tmp_path, max_steps=4, seed=5)


def test_checkpoint_of_another_model_is_refused(tmp_path):
    fit(Tiny(), run_dir=tmp_path)
    other = Tiny()
    other.more = torch.nn.Linear(2, 2)
    with pytest.raises(hpctrain.UserError, match=r"does not match Tiny(.|\n)*more.weight"):
        fit(other, run_dir=tmp_path, max_steps=4)


def test_failed_save_is_reported_and_a_failed_final_save_is_an_error(tmp_path, capsys):
    (tmp_path / "checkpoints").write_text("in the way")
    # It continues to the last step, whose state is the result of the run.
    with pytest.raises(hpctrain.CheckpointError, match="step 2 was not written"):
        fit(Tiny(), run_dir=tmp_path, checkpoint_every=1)
    assert "step 1 was not written" in (output := capsys.readouterr().out)
    assert "Training continues" in output
    assert [event["kind"] for event in read_json_lines(RunDir(tmp_path).events)] == ["failure", "failure"]


def test_second_training_does_not_use_the_first_ones_checkpoints(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(tmp_path / "run"))
    fit(Tiny())
    for settings in ({}, {"devices": 2}):  # in this process, and in processes that it starts
        with pytest.raises(hpctrain.UserError, match=r"already completed fit\(\) in .*Trainer\(run_dir="):
            fit(Tiny(), **settings)
    assert fit(Tiny(), run_dir=tmp_path / "second").step == 2


def test_nothing_is_written_without_a_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit(Tiny())
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_second_training_is_created_before_its_records(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HPCTRAIN_RUN_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("HPCTRAIN_ATTEMPT", "0")
    fit(Tiny(), run_dir=tmp_path / "runs" / "second")
    assert "cannot write" not in capsys.readouterr().out
