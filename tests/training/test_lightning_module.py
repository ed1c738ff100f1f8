"""LightningModules in hpctrain's Trainer: what docs/frameworks.md lists works, and all else is refused."""

import json
import re
import sqlite3
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import REPOSITORY, SCRIPTS
from helpers.fork_server import run_forked
from helpers.ranks import run_on_ranks
from helpers.tracker_files import neptune_points
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import hpctrain
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.telemetry.loggers import LoggedRun, MetricRecord, find_loggers

lightning = pytest.importorskip("lightning")
import torchmetrics  # noqa: E402 (installed with Lightning)

X = torch.randn(10, 3, generator=torch.Generator().manual_seed(1))
DATA = TensorDataset(X, X.sum(1, keepdim=True))


def loader(**options) -> DataLoader:
    """Return a loader with three batches per epoch, the last one with two samples."""
    return DataLoader(DATA, batch_size=4, **options)


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.constant_(self.layer.weight, 0.1)
        nn.init.zeros_(self.layer.bias)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, *data, **settings) -> hpctrain.Trainer:
    """Train for two epochs of three steps."""
    trainer = hpctrain.Trainer(**{"max_epochs": 2, **settings})
    trainer.fit(module, *(data or (loader(),)))
    return trainer


def metrics(run: Path, name: str) -> list[float]:
    """Return the values in `metrics.jsonl`."""
    return [record[name] for record in read_json_lines(RunDir(run).metrics) if name in record]


def refuses(message: str):
    return pytest.raises(hpctrain.UserError, match=message)


#: Rows of the table in the docs, as written in its first column, and their tests.
ROWS = {}


def row(first_cell: str):
    def register(test):
        ROWS[first_cell] = test
        return test

    return register


def test_every_row_of_the_table_has_a_test():
    text = (REPOSITORY / "docs" / "frameworks.md").read_text()
    section = text.partition("## Lightning modules in hpctrain's Trainer")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert cells == [*ROWS]


# Rows of the table


@pytest.mark.slow
@row("`training_step`, `training_step_end`")
def test_steps_return_a_loss_or_a_dict_with_it(tmp_path):
    class Steps(Line):
        def training_step(self, batch):
            return {"loss": super().training_step(batch, 0), "prediction": self.layer(batch[0])}

        def training_step_end(self, output):
            return {**output, "loss": 2 * output["loss"]}

    one, other = Line(), Steps()
    fit(one, run_dir=tmp_path / "one", max_steps=1, max_epochs=None)
    fit(other, run_dir=tmp_path / "other", max_steps=1, max_epochs=None)
    (loss,), (doubled,) = metrics(tmp_path / "one", "loss"), metrics(tmp_path / "other", "loss")
    assert doubled == 2 * loss

    assert not metrics(tmp_path / "other", "prediction")


@row("`validation_step`, `test_step`, `predict_step`, `validation_step_end`, `test_step_end`")
def test_steps_of_evaluations():
    class Steps(Line):
        def validation_step(self, batch):
            return batch[0].sum(1)

        def validation_step_end(self, outputs):
            self.log("mean", outputs.mean())

        def test_step(self, batch, batch_idx):
            self.log("count", len(batch[0]), batch_size=len(batch[0]))

    module, trainer = Steps(), hpctrain.Trainer(max_steps=1)
    mean = pytest.approx(X.sum(1).mean().item(), rel=1e-5)
    assert trainer.validate(module, loader()) == {"mean": mean}
    assert trainer.test(model=module, dataloaders=loader()) == {"count": pytest.approx((16 + 16 + 4) / 10)}
    outputs = trainer.predict(Predicting(), loader())
    assert torch.equal(torch.cat(outputs), X)
    assert type(module) is Steps


class Predicting(Line):
    def predict_step(self, batch):
        return batch[0]


@row("`self.log`, `self.log_dict`")
def test_logged_values_are_means_over_the_samples(tmp_path, capsys):
    class Logs(Line):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log(
                "train_loss", loss, on_step=True, on_epoch=False, prog_bar=True, batch_size=len(batch[0])
            )
            self.log_dict({"size": len(batch[0]), "number": batch_idx}, sync_dist=True, batch_size=4)
            if batch_idx == 2:
                self.log("last", 1.0, on_epoch=True)
            return loss

        def on_train_epoch_end(self):
            self.log("epoch_end", 7.0, on_step=False, on_epoch=True)

        def validation_step(self, batch, batch_idx):
            self.log("val_sum", batch[0].sum(1).mean(), on_epoch=True)

        def on_validation_epoch_end(self):
            self.log("at_end", torch.tensor(3.0))

    trainer = fit(Logs(), loader(), loader(), run_dir=tmp_path)
    assert metrics(tmp_path, "train_loss") == metrics(tmp_path, "loss")
    assert metrics(tmp_path, "size") == [4, 4, 2] * 2
    assert metrics(tmp_path, "number") == [0, 1, 2] * 2
    assert metrics(tmp_path, "epoch_end") == [7, 7]
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "hpctrain records each value" in line)
    assert "Logs.log('last', on_epoch=True): hpctrain" in line
    assert trainer.metrics == {"val_sum": pytest.approx(X.sum(1).mean().item(), rel=1e-5), "at_end": 3}


class LogsInHooks(Line):
    """Logs the means over a rank's samples in the hooks at the end of batches and of validations."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("batch_end", batch[0].mean())

    def on_validation_epoch_start(self):
        self.seen = []

    def validation_step(self, batch, batch_idx):
        self.seen.append(batch[0])

    def on_validation_epoch_end(self):
        self.log("epoch_end", torch.cat(self.seen).mean())


def fit_on_ranks(folder: str) -> float:
    """Train for an epoch; the ranks have 2, 1 and 1 samples of a batch, and 1, 1 and 0 of the last."""
    return fit(LogsInHooks(), loader(), loader(), max_epochs=1, run_dir=folder).metrics["epoch_end"]


@pytest.mark.ranks
@pytest.mark.extended
def test_values_of_hooks_are_weighted_by_the_samples_of_each_rank(tmp_path):
    means = run_on_ranks(fit_on_ranks, str(tmp_path), world_size=3)
    assert means == [pytest.approx(X.mean().item(), rel=1e-5)] * 3
    expected = [X[low : low + 4].mean().item() for low in (0, 4, 8)]
    assert metrics(tmp_path, "batch_end") == pytest.approx(expected, rel=1e-5)


@row("`self.log` with a torchmetrics metric")
def test_metrics_are_computed_over_the_validation_set(tmp_path):
    class Metrics(Line):
        def __init__(self):
            super().__init__()
            self.largest = torchmetrics.MaxMetric()
            self.both = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.MinMetric()])

        def training_step(self, batch, batch_idx):
            self.largest(batch[0])
            self.log("largest", self.largest)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.both.update(batch[0])
            self.log_dict(self.both)
            self.log("size", len(batch[0]))

        def on_validation_epoch_end(self):
            if not self.trainer.sanity_checking:
                self.seen = dict(self.trainer.callback_metrics)
            self.log("constant", 1)

    module = Metrics()
    trainer = fit(module, loader(), loader(), run_dir=tmp_path)
    expected = {"MeanMetric": X.mean().item(), "MinMetric": X.min().item(), "size": 3.6}
    assert module.seen.pop("constant") == 1  # of the validation before
    assert module.seen == pytest.approx(expected, rel=1e-5)
    assert trainer.metrics == pytest.approx({**expected, "constant": 1}, rel=1e-5)


@row("`self.trainer`, `self.device`, `self.global_rank`, `self.local_rank`, `self.print`")
def test_properties(tmp_path, capsys):
    seen = {}

    class Properties(Line):
        def training_step(self, batch, batch_idx):
            trainer = self.trainer
            seen["ranks"] = (self.global_rank, self.local_rank, trainer.world_size, trainer.num_nodes)
            seen["device"] = (self.device, trainer.strategy.root_device)
            seen.setdefault("position", []).append((self.current_epoch, self.global_step))
            seen["ends"] = (trainer.max_epochs, trainer.max_steps, trainer.estimated_stepping_batches)
            seen["folder"] = trainer.default_root_dir
            seen["flags"] = (trainer.is_global_zero, trainer.training, trainer.sanity_checking)
            trainer.strategy.barrier()
            if self.global_step == 3:
                self.print("hello")
                trainer.should_stop = True
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            seen.setdefault("sanity", []).append(self.trainer.sanity_checking)
            self.log("val", 5)

        def on_train_epoch_start(self):
            seen["metrics"] = self.trainer.callback_metrics

    module = Properties()
    trainer = fit(module, loader(), loader(), run_dir=tmp_path, max_epochs=9)
    assert trainer.step < 7
    # After the training, the module still has its state.
    assert module.trainer.callback_metrics == {"val": torch.tensor(5.0)}
    assert (module.trainer.global_step, module.trainer.should_stop) == (trainer.step, True)
    with refuses("hpctrain does not provide self.trainer.save_checkpoint"):
        module.trainer.save_checkpoint("last.ckpt")
    assert seen["ranks"] == (0, 0, 1, 1)
    assert seen["device"] == (torch.device("cpu"),) * 2
    assert seen["position"][:4] == [(0, 0), (0, 1), (0, 2), (1, 3)]
    assert seen["ends"] == (9, -1, 27)
    assert seen["folder"] == str(tmp_path)
    assert seen["flags"] == (True, True, False)
    assert seen["sanity"][:4] == [True, False, False, False]
    assert seen["metrics"] == {"val": torch.tensor(5.0)}
    assert "hello" in capsys.readouterr().out


@row("`save_hyperparameters`, `self.hparams`")
def test_hyperparameters():
    class Hyper(Line):
        def __init__(self, lr):
            super().__init__()
            self.save_hyperparameters()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    module, still = Hyper(lr=0.1), Hyper(lr=0.0)
    fit(module)
    fit(still)
    assert torch.equal(still.layer.weight, Line().layer.weight)
    assert not torch.equal(module.layer.weight, still.layer.weight)


class Data(lightning.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage} {self.trainer.world_size}")

    def train_dataloader(self):
        return loader()

    def val_dataloader(self):
        return [loader()]

    def teardown(self, stage):
        self.calls.append(f"teardown {stage}")

    def state_dict(self):
        return {"calls": len(self.calls)}

    def load_state_dict(self, state_dict):
        self.calls.append(state_dict)


@pytest.mark.slow
@row("`LightningDataModule`: `prepare_data`, `setup`, `teardown`, `state_dict`, `*_dataloader`")
def test_data_module(tmp_path):
    class Validated(Line):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx))

    for argument in ({"datamodule": Data()}, {"train_dataloaders": Data()}):
        (data,), module = argument.values(), Validated()
        hpctrain.Trainer(max_epochs=2).fit(module, **argument)
        assert data.calls == ["prepare_data", "setup fit 1", "teardown fit"]
        assert hpctrain.Trainer(max_steps=1).validate(module, datamodule=data)["val_loss"] < 1
    for max_epochs in (1, 2):
        data = Data()
        hpctrain.Trainer(max_epochs=max_epochs, run_dir=tmp_path).fit(Validated(), datamodule=data)
    assert {"calls": 2} in data.calls


@row("`train_dataloader`, `val_dataloader` of the module")
def test_loaders_of_the_module(tmp_path):
    class Loads(Line):
        def train_dataloader(self):
            return loader(drop_last=True)

        def val_dataloader(self):
            return loader()

        def validation_step(self, batch, batch_idx):
            self.log("val", 1)

    module = Loads()
    trainer = hpctrain.Trainer(max_epochs=2, run_dir=tmp_path)
    trainer.fit(module)
    assert (trainer.step, trainer.metrics) == (4, {"val": 1})


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=1.0)


@row(
    "`configure_optimizers`: optimizer, dict, `([optimizer], [schedule])`; `interval`, `frequency`, `monitor`"
)
@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (lambda optimizer, halve: optimizer, [1] * 6),
        (lambda optimizer, halve: ([optimizer], [halve]), [1, 1, 1, 0.5, 0.5, 0.5]),
        (lambda optimizer, halve: {"optimizer": optimizer, "lr_scheduler": halve}, [1, 1, 1, 0.5, 0.5, 0.5]),
        (
            lambda optimizer, halve: {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": halve, "interval": "step", "frequency": 2},
            },
            [1, 1, 0.5, 0.5, 0.5, 0.25],
        ),
        (
            lambda optimizer, halve: {
                "optimizer": optimizer,
                "lr_scheduler": {
                    "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(
                        optimizer, factor=0.5, patience=0
                    ),
                    "monitor": "val",
                },
            },
            [1, 1, 1, 1, 1, 1, 0.5, 0.5, 0.5],
        ),
    ],
)
@pytest.mark.parametrize("trainer", ["hpctrain", "lightning"])
def test_schedules_advance_as_in_lightning(schedule, rates, trainer):
    class Scheduled(Line):
        rates = ()

        def training_step(self, batch, batch_idx):
            self.rates = (*self.rates, self.optimizers(use_pl_optimizer=False).param_groups[0]["lr"])
            return 0 * super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            self.log("val", 1.0)

        def configure_optimizers(self):
            optimizer = sgd(self)
            return schedule(optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))

    module, epochs = Scheduled(), len(rates) // 3
    if trainer == "hpctrain":
        fit(module, loader(), loader(), max_epochs=epochs)
    else:
        lightning_trainer(max_epochs=epochs).fit(module, loader(), loader())
    assert module.rates == tuple(rates)


def lightning_trainer(**options):
    return lightning.Trainer(
        **options,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=lightning.fabric.plugins.environments.LightningEnvironment(),
    )


@row("`lr_scheduler_step`")
def test_schedule_of_another_library():
    class Timm(Line):
        calls = ()

        def configure_optimizers(self):
            schedule = SimpleNamespace(state_dict=dict, load_state_dict=dict, step=None)
            return [sgd(self)], [{"scheduler": schedule, "interval": "epoch"}]

        def lr_scheduler_step(self, scheduler, metric):
            self.calls = (*self.calls, self.current_epoch)

    module = Timm()
    fit(module)
    assert module.calls == (0, 1)


@row(
    "`automatic_optimization = False`: `optimizers`, `lr_schedulers`, `manual_backward`, `clip_gradients`, "
    "`toggle_optimizer`, `toggle_model`"
)
def test_manual_optimization_equals_lightning():
    class Manual(Line):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.other = nn.Linear(1, 1, bias=False)
            nn.init.ones_(self.other.weight)
            self.losses = []

        def training_step(self, batch, batch_idx):
            first, second = self.optimizers()
            self.toggle_optimizer(first)
            loss = super().training_step(batch, batch_idx)
            first.zero_grad()
            self.manual_backward(loss)
            self.manual_backward(self.layer.weight.square().sum())
            self.clip_gradients(first, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            first.step()
            self.untoggle_optimizer(first)
            if batch_idx % 2 == 0:
                second.zero_grad()
                self.manual_backward(F.mse_loss(self.other(self.layer(batch[0]).detach()), batch[1]))
                self.clip_gradients(second, gradient_clip_val=0.1, gradient_clip_algorithm="value")
                second.step()
                self.lr_schedulers().step()
            self.losses.append(loss.item())

        def configure_optimizers(self):
            first, second = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (self.layer, self.other))
            return [first, second], [torch.optim.lr_scheduler.StepLR(second, 2)]

    ours, theirs = Manual(), Manual()
    fit(ours)
    lightning_trainer(max_epochs=2).fit(theirs, loader())
    assert ours.losses == theirs.losses
    assert_same_weights(ours, theirs)


class Adversaries(Line):
    """A GAN with an update of each network every two batches and at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(1, 1)
        nn.init.ones_(self.critic.weight)
        nn.init.zeros_(self.critic.bias)

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        is_last = (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch
        x, y = batch
        x.requires_grad = True
        made = self.layer(x)
        with d_opt.toggle_model(sync_grad=is_last):
            d_loss = F.softplus(-self.critic(y)).mean() + F.softplus(self.critic(made.detach())).mean()
            self.manual_backward(d_loss)
            if is_last:
                d_opt.step()
                d_opt.zero_grad()
        with g_opt.toggle_model(sync_grad=is_last):
            g_loss = F.softplus(-self.critic(made)).mean()
            self.manual_backward(g_loss)
            if is_last:
                g_opt.step()
                g_opt.zero_grad()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def configure_optimizers(self):
        return [torch.optim.Adam(each.parameters(), lr=0.1) for each in (self.layer, self.critic)]


def test_adversaries_that_accumulate_gradients_equal_lightning_after_a_stop(tmp_path):
    ours, theirs = Adversaries(), Adversaries()
    fit(ours, run_dir=tmp_path / "whole")
    lightning_trainer(max_epochs=2).fit(theirs, loader())
    assert_same_weights(ours, theirs)
    assert len(metrics(tmp_path / "whole", "g_loss")) == 6
    for max_steps in (1, 4, 6):  # after steps 1 and 4, the networks have gradients
        resumed = Adversaries()
        fit(resumed, run_dir=tmp_path / "parts", max_steps=max_steps, max_epochs=None)
    assert_same_weights(resumed, theirs)


def assert_same_weights(one, other):
    for mine, others in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, others)


class Hooks(Line):
    """Records each hook, with the epoch and step, and a number that depends on the weights."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def validation_step(self, batch, batch_idx):
        self.log("val", 1)
        return batch_idx

    test_step = validation_step


def recording(hook):
    def call(self, *arguments):
        weight = self.layer.weight.sum().item()
        self.calls.append((hook, self.current_epoch, self.global_step, weight, *map(str, arguments)))

    return call


HOOKS = [
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_train_batch_end"),
    *("on_train_epoch_end", "on_train_end", "on_fit_end", "on_after_backward", "on_before_optimizer_step"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
]
TEST_HOOKS = [name.replace("validation", "test") for name in HOOKS if "validation" in name]
for name in (*HOOKS, *TEST_HOOKS):
    setattr(Hooks, name, recording(name))


@pytest.mark.slow
@row(
    "`on_fit_*`, `on_train_*`, `on_validation_*`, `on_test_*`, `on_after_backward`, "
    "`on_before_optimizer_step`"
)
def test_hooks_are_called_as_by_lightning():
    ours, theirs = Hooks(), Hooks()
    fit(ours, loader(), loader())
    lightning_trainer(max_epochs=2, num_sanity_val_steps=1).fit(theirs, loader(), loader())
    assert {call[0] for call in theirs.calls} == {*HOOKS}
    at_end = [call[0] for call in ours.calls].index("on_train_epoch_end")
    assert ours.calls[:at_end] == theirs.calls[:at_end]
    # Lightning validates before the end of the epoch.
    assert sorted(ours.calls[at_end:-2]) == sorted(theirs.calls[at_end:-2])
    assert [call[0] for call in ours.calls[-2:]] == [call[0] for call in theirs.calls[-2:]]
    assert_same_weights(ours, theirs)
    ours, theirs = Hooks(), Hooks()
    hpctrain.Trainer(max_steps=1).test(ours, loader())
    lightning_trainer().test(theirs, loader(), verbose=False)
    assert {call[0] for call in ours.calls} == {*TEST_HOOKS}
    assert ours.calls == theirs.calls


@row("`on_after_batch_transfer`")
def test_batches_can_be_changed_on_the_device(tmp_path):
    class Changed(Line):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0], torch.zeros(len(batch[0]), 1)

    fit(Changed(), run_dir=tmp_path / "module", max_epochs=30)
    assert metrics(tmp_path / "module", "loss")[-1] < 0.01

    class ChangingData(Data):
        on_after_batch_transfer = Changed.on_after_batch_transfer

    trainer = hpctrain.Trainer(max_epochs=30, run_dir=tmp_path / "data")
    trainer.fit(Line(), datamodule=ChangingData())
    assert metrics(tmp_path / "data", "loss")[-1] < 0.01


@row("`configure_model`, `setup`, `prepare_data`, `teardown`")
def test_layers_can_be_made_late():
    class Late(Line):
        def prepare_data(self):
            self.order = ["prepare_data"]

        def setup(self, stage):
            self.order.append(f"setup {stage}")

        def configure_model(self):
            self.order.append("configure_model")
            self.layer = nn.Linear(3, 1)

        def configure_optimizers(self):
            self.order.append("configure_optimizers")
            return super().configure_optimizers()

        def teardown(self, stage):
            self.order.append(f"teardown {stage}")

    module = Late()
    fit(module)
    assert module.order == [
        *("prepare_data", "setup fit", "configure_model", "configure_optimizers", "teardown fit")
    ]


@row("`on_save_checkpoint`, `on_load_checkpoint`")
def test_module_adds_to_checkpoints(tmp_path):
    class Counts(Line):
        count = 0

        def training_step(self, batch, batch_idx):
            self.count += 1
            return super().training_step(batch, batch_idx)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["count"] = self.count

        def on_load_checkpoint(self, checkpoint):
            self.count = checkpoint["count"]

    for max_epochs in (1, 2):
        module = Counts()
        fit(module, run_dir=tmp_path, max_epochs=max_epochs)
    assert module.count == 6


# Exactness


def test_losses_equal_those_of_lightning(tmp_path):
    class Losses(Line):
        def __init__(self):
            super().__init__()
            self.drop, self.losses = nn.Dropout(0.3), []

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.layer(self.drop(batch[0])), batch[1])
            self.losses.append(loss.item())
            return loss

    ours, theirs = Losses(), Losses()
    trainer = hpctrain.Trainer(max_epochs=3, gradient_clip_val=0.5)
    for module in (ours, theirs):
        module.on_train_start = lambda: torch.manual_seed(5)
    trainer.fit(ours, loader())
    # Without its own generator, the loader draws a number per epoch from the one of dropout.
    lightning_trainer(max_epochs=3, gradient_clip_val=0.5).fit(theirs, loader(generator=torch.Generator()))
    assert len(ours.losses) == 9
    assert ours.losses == theirs.losses
    assert_same_weights(ours, theirs)


@pytest.mark.ranks
@pytest.mark.long
def test_stopped_runs_on_two_ranks_end_with_the_same_bits(tmp_path):
    """With automatic optimization, and with two optimizers."""

    def train(folder, *stop):
        variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
        script = SCRIPTS / "train_lightning_module.py"
        output = run_forked(script, [str(tmp_path / folder), *stop], variables, ranks=2)
        return json.loads(output.splitlines()[-1])

    undisturbed = train("whole")
    # The first stop is in the middle of an epoch, the second at its end, before the validation.
    for step, rank in ((7, 0), (15, 1)):
        assert all(step <= each["step"] < step + 5 for each in train("parts", str(step), str(rank)))
    assert train("parts") == undisturbed
    for name in ("Sine", "Adversaries"):
        records = read_json_lines(RunDir(tmp_path / "parts" / name).metrics)
        losses = {record["step"]: record["loss"] for record in records}
        assert [losses[step] for step in range(1, 21)] == metrics(tmp_path / "whole" / name, "loss")


# Refusals


class Refused(Line):
    steps = 0

    def training_step(self, batch, batch_idx):
        type(self).steps += 1
        return super().training_step(batch, batch_idx)


def refused(**methods):
    """Return a class with these methods."""
    return type("Sine", (Refused,), {**methods, "steps": 0})


@pytest.mark.parametrize(
    ("hook", "remedy"),
    [
        ("configure_ddp", "use the Trainer settings find_unused_parameters"),
        ("transfer_batch_to_device", "use on_after_batch_transfer"),
        ("on_validation_model_eval", "hpctrain.lightning.Trainer"),
        ("backward", "use manual optimization"),
        ("validation_epoch_end", "use on_validation_epoch_end"),
        ("all_gather", "hpctrain.lightning.Trainer"),
    ],
)
def test_other_hooks_are_refused_before_the_first_step(hook, remedy):
    kind = refused(**{hook: lambda self, *_: None})
    with refuses(rf"Sine overrides {hook}, which hpctrain.Trainer does not call\. .*{remedy}"):
        fit(kind())
    assert kind.steps == 0


def test_hooks_of_predictions_are_refused_only_there():
    class Predicts(Predicting):
        def on_predict_epoch_end(self):
            raise AssertionError

    fit(Predicts())
    with refuses("overrides on_predict_epoch_end"):
        hpctrain.Trainer(max_steps=1).predict(Predicts(), loader())


def two_optimizers(module):
    return [sgd(module), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)]


def plateau(module):
    optimizer = sgd(module)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


class Manual(Refused):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Stream(IterableDataset):
    def __iter__(self):
        yield from DATA


@pytest.mark.parametrize(
    ("module", "data", "settings", "message"),
    [
        (
            refused(configure_optimizers=two_optimizers),
            loader(),
            {},
            "several optimizers require manual optimization",
        ),
        (
            refused(training_step=lambda self, batch, batch_idx, optimizer_idx: None),
            loader(),
            {},
            "training_step has the parameter optimizer_idx",
        ),
        (refused(configure_optimizers=lambda self: None), loader(), {}, r"returned \[None\] as optimizers"),
        (refused(configure_optimizers=plateau), loader(), {}, "'val_loss'.* requires .* validation data"),
        (
            refused(train_dataloader=lambda self: {"a": loader(), "b": loader()}),
            None,
            {},
            "train data has 2 DataLoaders",
        ),
        (refused(), None, {}, "received no training data"),
        (refused(), loader(), {"elastic_determinism": True, "grain_size": 2}, "elastic_determinism=True is"),
        (
            refused(on_train_epoch_end=lambda self: None),
            DataLoader(Stream()),
            {},
            "has on_train_epoch_end .* a stream",
        ),
        (
            Manual,
            loader(),
            {"gradient_clip_val": 1.0},
            "gradient_clip_norm=1.0 is not .* manual optimization",
        ),
        (Manual, loader(), {"on_bad_loss": "skip"}, "on_bad_loss='skip' is not .* manual optimization"),
    ],
)
def test_unsupported_modules_are_refused_before_the_first_step(module, data, settings, message):
    with refuses(message):
        fit(module(), data, **settings)
    assert module.steps == 0


@pytest.mark.parametrize(
    ("hook", "call", "message"),
    [
        ("on_fit_start", lambda m: m.logger.experiment, r"provide self.trainer.logger.*Trainer\(loggers=…\)"),
        ("on_fit_start", lambda m: m.trainer.profiler, "hpctrain does not provide self.trainer.profiler"),
        ("on_fit_start", lambda m: m.log("count", 1), "called in a hook that cannot log metrics"),
        (
            "validation_step",
            lambda m: m.log("count", 1, reduce_fx="sum"),
            r"log\('count', …\) has reduce_fx=",
        ),
        ("validation_step", lambda m: m.log("count", 1, rank_zero_only=True), "has rank_zero_only=True"),
        ("validation_step", lambda m: m.log("count", 1.0, batch_size=3), "weighted by the 4 samples"),
    ],
)
def test_unsupported_calls_are_refused_by_name(hook, call, message, tmp_path):
    module = refused(**{hook: lambda self, *_: call(self)})()
    with refuses(message):
        fit(module, loader(), loader(), run_dir=tmp_path)
    assert not metrics(tmp_path, "loss")


def test_arguments_of_lightnings_fit():
    module = Line()
    hpctrain.Trainer(max_epochs=1).fit(model=module, train_dataloaders=loader(), ckpt_path="last")
    for arguments, message in (
        ({"ckpt_path": "a.ckpt"}, "ckpt_path is not supported. A run resumes"),
        ({"train_dataset": DATA, "train_dataloaders": loader()}, "both train_dataset and train_dataloaders"),
        ({"train_loader": loader()}, "fit() has no argument 'train_loader'. Did you mean 'train_dataset'"),
    ):
        with refuses(re.escape(message)):
            hpctrain.Trainer(max_epochs=1).fit(module, **arguments)


def test_loggers_of_lightning_write_to_their_destinations(tmp_path, monkeypatch):
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger

    given = [CSVLogger(tmp_path / "logs", "own"), TensorBoardLogger(tmp_path / "logs", "board")]
    for logger in hpctrain.Trainer(max_steps=1, logger=given).loggers:
        logger.start(LoggedRun("run", tmp_path))
        logger.log([MetricRecord(1, 0.0, 0, 0, {"loss": 2.0})])
        logger.finish("completed")
    lines = (tmp_path / "logs" / "own" / "run" / "metrics.csv").read_text().splitlines()
    assert lines == ["step,epoch,time,attempt,loss", "1,0,0.0,0,2.0"]
    assert [*(tmp_path / "logs" / "board" / "run").glob("events.out.tfevents.*")]
    monkeypatch.setenv("WANDB_MODE", "offline")
    (wandb,) = find_loggers(WandbLogger(project="vision", name="first", save_dir=tmp_path))
    assert wandb.options.items() >= {"project": "vision", "name": "first", "dir": str(tmp_path)}.items()


def log_with(kind: str, folder: Path) -> None:
    """Log a value with hpctrain's counterpart of Lightning's logger."""
    if kind == "MLFlowLogger":
        uri = f"sqlite:///{folder / 'own.db'}"
        given = lightning.pytorch.loggers.MLFlowLogger("vision", tracking_uri=uri)
    else:  # Lightning no longer has this logger
        attributes = {"__module__": "lightning.pytorch.loggers.neptune", "_project_name": "a/b"}
        given = type(kind, (), attributes)()
    (logger,) = hpctrain.Trainer(max_steps=1, logger=given).loggers
    logger.start(LoggedRun("run", folder))
    logger.log([MetricRecord(1, 0.0, 0, 0, {"loss": 2.0})])
    logger.finish("completed")


@pytest.mark.ranks
@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "package"), [("MLFlowLogger", "mlflow"), ("NeptuneLogger", "neptune_scale")]
)
def test_loggers_of_lightning_write_to_the_files_of_their_services(kind, package, tmp_path):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    env = {"NEPTUNE_MODE": "offline"}
    run_on_ranks(log_with, kind, tmp_path, world_size=1, env=env, group=False)
    if kind == "MLFlowLogger":
        with sqlite3.connect(tmp_path / "own.db") as database:
            query = "SELECT name, key, value FROM metrics JOIN runs USING (run_uuid)"
            assert database.execute(query).fetchall() == [("run", "loss", 2.0)]
    else:
        assert neptune_points(tmp_path) == [("loss", 1, 2.0)]
