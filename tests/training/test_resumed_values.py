"""Values of optimizers and schedulers that a resumed run takes from its checkpoint."""

import functools
import json
import math
import time

import pytest
import torch
from torch import nn

import hpctrain
from hpctrain.errors import UserError
from hpctrain.rundir import RunDir
from hpctrain.telemetry.hparams import applied_hparams
from hpctrain.telemetry.report.pages import render_run_page
from hpctrain.telemetry.report.run_data import RunData
from hpctrain.telemetry.report.run_results import read_results

torch.manual_seed(0)
DATA = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))


class Net(hpctrain.Module):
    """Linear model with the optimizer and schedules that `configure` returns."""

    def __init__(self, configure) -> None:
        super().__init__()
        self.layer, self.configure = nn.Linear(4, 1), configure
        self.fails_at = None

    def training_step(self, batch, batch_idx):
        if self.fails_at == batch_idx + 1:
            raise RuntimeError("planned")
        group = self.optimizer.param_groups[0]
        scalars = {name: torch.tensor(group[name]) for name in ("lr", "weight_decay")}
        return {"loss": nn.functional.mse_loss(self.layer(batch[0]), batch[1]), **scalars}

    def configure_optimizers(self):
        self.optimizer, *schedules = self.configure(self.parameters())
        return [self.optimizer], schedules


def sgd(parameters, lr=0.1, **options):
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9, **options)


def with_schedule(make):
    def configure(parameters):
        optimizer = sgd(parameters)
        return optimizer, make(optimizer)

    return configure


def cosine(num_steps):
    return with_schedule(lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps))


def one_cycle(num_steps):
    make = functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=num_steps)
    return with_schedule(make)


def fit(folder, max_steps, configure, *, fails_at=None, **options):
    trainer = hpctrain.Trainer(max_steps=max_steps, global_batch_size=8, run_dir=folder, **options)
    module = Net(configure)
    module.fails_at = fails_at
    trainer.fit(module, DATA)
    return trainer


def trained(folder, name):
    records = map(json.loads, RunDir(folder).metrics.read_text().splitlines())
    return {record["step"]: record[name] for record in records}


class LongerSchedule(hpctrain.Callback):
    """Extends a CosineAnnealingLR, as the message of the refusal says; with the rate of a longer schedule."""

    def on_fit_start(self, trainer, module):
        trainer.schedulers[0].T_max = 12
        trainer.optimizers[0].param_groups[0]["lr"] = 0.05


def test_longer_schedule_is_refused_until_a_callback_extends_it(tmp_path, capsys):
    fit(tmp_path, 6, cosine(6))
    assert "CosineAnnealingLR" not in capsys.readouterr().out
    with pytest.raises(
        UserError,
        match=r"CosineAnnealingLR ends after step 6 \(T_max=6, the value in the checkpoint; the script sets "
        r"12\), but training ends after step 12\. To extend the schedule",
    ):
        fit(tmp_path, 12, cosine(12))
    output = capsys.readouterr().out
    assert "T_max of CosineAnnealingLR remains 6, the value in the checkpoint, although the script" in output
    assert output.count("remains") == 1
    assert max(trained(tmp_path, "lr")) == 6
    fit(tmp_path, 12, cosine(12), callbacks=[LongerSchedule()])
    fit(tmp_path / "fresh", 12, cosine(12))
    rates, fresh = trained(tmp_path, "lr"), trained(tmp_path / "fresh", "lr")
    assert rates[6] < 0.01
    assert [rates[step] for step in range(7, 13)] == pytest.approx([fresh[step] for step in range(7, 13)])


def test_longer_sequential_schedule_is_refused(tmp_path):
    def sequential(num_steps):
        def make(optimizer):
            schedules = [
                torch.optim.lr_scheduler.ConstantLR(optimizer, 0.1, 2),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps - 2),
            ]
            return torch.optim.lr_scheduler.SequentialLR(optimizer, schedules, milestones=[2])

        return with_schedule(make)

    fit(tmp_path, 6, sequential(6))
    with pytest.raises(
        UserError, match=r"SequentialLR ends after step 6 \(T_max=6, the value in the checkpoint"
    ):
        fit(tmp_path, 12, sequential(12))


def test_schedule_of_a_session_that_cannot_continue_is_refused(tmp_path):
    def train(num_steps):
        with hpctrain.session(seed=1, run_dir=tmp_path) as s:
            module = nn.Linear(4, 1)
            optimizer = sgd(module.parameters())
            scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=num_steps)
            module, optimizer, scheduler = s.prepare(module, optimizer, scheduler)
            for inputs, targets in s.batches(DATA, global_batch_size=8, max_steps=num_steps):
                s.backward(nn.functional.mse_loss(module(inputs), targets))
                optimizer.step()
                scheduler.step()

    train(8)
    with pytest.raises(UserError, match=r"OneCycleLR ends after step 8 .* but training ends after step 16"):
        train(16)


def transformers_cosine(num_steps):
    transformers = pytest.importorskip("transformers")
    make = transformers.get_cosine_schedule_with_warmup
    return with_schedule(functools.partial(make, num_warmup_steps=1, num_training_steps=num_steps))


@pytest.mark.parametrize(
    ("make_schedule", "end"), [(cosine, "T_max=3"), (transformers_cosine, "num_training_steps=3")]
)
def test_schedule_that_ends_long_before_training_is_noted(tmp_path, capsys, make_schedule, end):
    fit(tmp_path, 12, make_schedule(3))
    note = f"ends after step 3 ({end}), but training ends after step 12. It advances once per step."
    assert note in capsys.readouterr().out


def test_lambda_schedule_of_the_script_applies(tmp_path, capsys):
    def linear(num_steps):
        return with_schedule(
            lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / num_steps)
        )

    fit(tmp_path, 4, linear(4))
    fit(tmp_path, 8, linear(8))
    assert trained(tmp_path, "lr")[6] == pytest.approx(0.1 * (1 - 5 / 8))
    assert "remains" not in capsys.readouterr().out


class ScheduledDecay(hpctrain.Callback):
    """Changes the weight decay after each step, as DINO does."""

    def on_step_end(self, trainer, module, metrics):
        trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * math.cos(trainer.step)


def test_scheduled_values_are_not_noted(tmp_path, capsys):
    options = {"checkpoint_every": 2, "callbacks": [ScheduledDecay()]}
    for fails_at in (6, None):
        try:
            fit(tmp_path, 8, one_cycle(8), fails_at=fails_at, **options)
        except RuntimeError:
            assert fails_at == 6
    output = capsys.readouterr().out
    assert "resumed after step" in output
    assert "remains" not in output


class NewRate(hpctrain.Callback):
    """Sets a new rate at the start, as the message recommends."""

    def on_fit_start(self, trainer, module):
        for group in trainer.optimizers[0].param_groups:
            group["lr"] = 0.01


def test_rate_can_be_changed_in_a_resumed_run(tmp_path, capsys):
    fit(tmp_path, 2, lambda parameters: [sgd(parameters, 0.1)])
    fit(tmp_path, 4, lambda parameters: [sgd(parameters, 0.01)], callbacks=[NewRate()])
    assert "lr remains 0.1, the value in the checkpoint, although the script now sets 0.01." in (
        capsys.readouterr().out
    )
    fit(tmp_path, 6, lambda parameters: [sgd(parameters, 0.01)], callbacks=[NewRate()])
    assert [round(rate, 4) for rate in trained(tmp_path, "lr").values()] == [0.1, 0.1] + [0.01] * 4
    assert "remains" not in capsys.readouterr().out


def adam(betas):
    return lambda parameters: [torch.optim.AdamW(parameters, betas=betas)]


def multi_step(milestones):
    return with_schedule(lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (adam((0.9, 0.999)), adam([0.9, 0.95]), "betas remains (0.9, 0.999), {}(0.9, 0.95)."),
        (multi_step([3, 3, 5]), multi_step([3, 7]), "milestones of MultiStepLR remains (3, 3, 5), {}(3, 7)."),
    ],
    ids=["betas", "milestones"],
)
def test_sequences_are_compared(tmp_path, capsys, old, new, message):
    fit(tmp_path, 2, old)
    fit(tmp_path, 3, old)
    assert "remains" not in capsys.readouterr().out
    fit(tmp_path, 4, new)
    reason = "the value in the checkpoint, although the script now sets "
    assert message.format(reason) in capsys.readouterr().out


def test_hyper_parameters_show_the_rate_that_trained(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.1"])
    fit(tmp_path, 2, lambda parameters: [sgd(parameters, 0.1)])
    monkeypatch.setattr("sys.argv", ["train.py", "--lr", "0.001"])
    fit(tmp_path, 4, lambda parameters: [sgd(parameters, 0.001)])
    assert read_results(RunDir(tmp_path)).hparams == {"lr": 0.1}
    command = ["hpctrain submit train.py --lr 0.001"]
    run_data = RunData(RunDir(tmp_path), "COMPLETED", now=time.time(), resubmit_command=command)
    assert len(run_data.resubmit_command) == 2
    page = render_run_page(run_data)
    assert "# lr remained 0.1, the value in the checkpoint, although the script set 0.001" in page


@pytest.mark.parametrize(
    ("hparams", "expected"),
    [
        ({"lr": 0.001, "wd": 0.001}, {"lr": 0.1, "wd": 0.001}),
        ({"optim.learning_rate": 0.001}, {"optim.learning_rate": 0.1}),
        ({"lr": 0.004}, {"lr": 0.004, "applied_lr": 0.1}),
        ({"seed": 3}, {"seed": 3, "lr": 0.1}),
    ],
)
def test_ignored_values_are_corrected_or_added(hparams, expected):
    assert applied_hparams(hparams, [("lr", 0.1, 0.001)]) == expected
