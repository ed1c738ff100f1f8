"""Methods of `hpctrain.Module` that are those of Lightning: logging, step ends, data, refused hooks."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.horovod_version import needs_horovod
from helpers.ranks import run_on_ranks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpctrain
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

X = torch.arange(10.0, dtype=torch.float64).unsqueeze(1)


class Logging(hpctrain.Module):
    def __init__(self, lr: float = 0.01, ignored: object = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore="ignored")
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.positions: list[tuple[int, int, bool]] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        self.log("mean_x", x.mean(), prog_bar=True)
        if batch_idx == 0:
            self.log_dict({"first": 4, "loss": -1.0})
        trainer = self.trainer
        self.positions.append((trainer.current_epoch, trainer.global_step, trainer.is_last_batch))
        assert trainer.world_size in (1, 2)
        assert len(trainer.optimizers) == 1
        assert self.device == torch.device("cpu")
        return (self.weight * x).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_x", batch[0].mean())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(X), batch_size=4)

    val_dataloader = test_dataloader = train_dataloader

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def train_logging(run: Path, settings: dict[str, Any]) -> list[dict]:
    module = Logging(0.02, ignored=object())
    trainer = hpctrain.Trainer(max_epochs=2, run_dir=run, **settings)
    trainer.fit(module)
    assert trainer.metrics == {"val_x": 4.5}
    if settings.get("micro_batch_size") is None:
        expected = [(epoch, 3 * epoch + i, i == 2) for epoch in (0, 1) for i in range(3)]
        assert sorted({*module.positions}) == expected
    with pytest.raises(AttributeError, match="trainer exists only during fit"):
        module.trainer  # noqa: B018
    return [*read_json_lines(RunDir(run).metrics)]


def check(records: list[dict]) -> None:
    assert [record["mean_x"] for record in records] == [1.5, 5.5, 8.5] * 2
    assert [record.get("first") for record in records] == [4, None, None] * 2
    assert all(record["loss"] >= 0 for record in records)  # the returned value, not the logged one


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch_size": 3},
        {"strategy": "dp", "devices": 3},
        {"elastic_determinism": True, "grain_size": 4},
    ],
)
def test_logged_values_are_means_over_the_batch(tmp_path, settings):
    check(train_logging(tmp_path, settings))
    environment, *_ = read_json_lines(RunDir(tmp_path).environment)
    assert environment["hparams"]["lr"] == 0.02
    assert "ignored" not in environment["hparams"]


def test_logged_values_are_in_the_progress_line(tmp_path, capsys):
    train_logging(tmp_path, {})
    output = capsys.readouterr().out
    assert re.search(r"^step 6/6 .* mean_x 8\.5\b", output, re.MULTILINE)
    assert "hpctrain records each value" not in output


class LoggingOptions(Logging):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("x", 1.0, on_step=False, on_epoch=True)
        self.log("y", 1.0, logger=False)
        return super().training_step(batch, batch_idx)


def test_options_of_log_without_effect_are_noted_once(capsys):
    hpctrain.Trainer(max_epochs=2).fit(LoggingOptions())
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "hpctrain records each value" in line)
    assert "LoggingOptions.log('x', on_step=False, on_epoch=True): hpctrain" in line


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("ddp2", marks=pytest.mark.extended), "zero3"])
def test_logged_values_are_means_over_all_ranks(tmp_path, strategy):
    check(run_on_ranks(train_logging, tmp_path, {"strategy": strategy}, group=False)[0])


class Ends(hpctrain.Module):
    """Records the number of samples that each `_end` method receives."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.stages = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).double()
        for layer in self.stages:
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.sizes: dict[str, list[int]] = {"training": [], "validation": [], "test": []}

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight * self.stages(batch[:, None])[:, 0]

    validation_step = test_step = training_step

    def _end(self, kind: str, outputs: torch.Tensor) -> torch.Tensor:
        self.sizes[kind].append(len(outputs))
        return outputs.max() - outputs.min() + 0 * self.weight

    def training_step_end(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._end("training", outputs)

    def validation_step_end(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._end("validation", outputs)

    def test_step_end(self, outputs: torch.Tensor) -> torch.Tensor:
        return self._end("test", outputs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def run_ends(settings: dict[str, Any]) -> tuple[dict[str, list[int]], float, float]:
    trainer = hpctrain.Trainer(max_steps=1, global_batch_size=10, sanity_val_batches=0, **settings)
    module = Ends()
    trainer.fit(module, X[:, 0], X[:, 0])
    (test,) = trainer.test(module, X[:, 0]).values()
    return module.sizes, trainer.metrics["val_loss"], test


def test_cpu_is_used_although_there_are_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for call in ({"accelerator": "cpu"}, {"gpus": 0}, {"accelerator": "cpu", "devices": 1}):
        module = Ends()
        hpctrain.Trainer(max_steps=1, global_batch_size=10, **call).fit(module, X[:, 0])
        assert module.device == torch.device("cpu")


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "size", "mean"),
    [
        *((name, 5, 4.0) for name in ("ddp", "zero3")),
        *(pytest.param(name, 5, 4.0, marks=pytest.mark.extended) for name in ("zero1", "zero2")),
        pytest.param("horovod", 5, 4.0, marks=needs_horovod),
        ("ddp2", 10, 9.0),
    ],
)
def test_step_ends_see_the_batch_of_the_rank_or_of_the_node(strategy, size, mean):
    for sizes, validation, test in run_on_ranks(run_ends, {"strategy": strategy}, group=False):
        assert sizes == {"training": [size], "validation": [size], "test": [size]}
        assert validation == test == mean


@pytest.mark.ranks
def test_step_ends_of_a_pipeline_see_micro_batches_on_the_last_stage():
    results = run_on_ranks(run_ends, {"strategy": "pipeline", "micro_batch_size": 5}, group=False)
    assert [sizes["training"] for sizes, _, _ in results] == [[], [5, 5]]
    assert all(sizes["validation"] == [5] and mean == 4.0 for sizes, mean, _ in results)


@pytest.mark.parametrize(
    ("hook", "remedy"),
    [
        ("configure_ddp", "use the Trainer settings find_unused_parameters"),
        ("optimizer_zero_grad", "hpctrain sets gradients to None"),
        ("on_train_epoch_end", "a callback or a LightningModule"),
        ("validation_epoch_end", "a callback or a LightningModule"),
    ],
)
def test_hooks_that_are_not_called_are_refused_before_the_first_step(hook, remedy):
    module = type("Sine", (Logging,), {hook: lambda self, *_: None})()
    with pytest.raises(
        hpctrain.UserError, match=rf"Sine overrides {hook}, which .* does not call\. .*{remedy}"
    ):
        hpctrain.Trainer(max_steps=1).fit(module)
    assert module.positions == []


def test_logging_outside_of_the_trainer_is_refused():
    with pytest.raises(hpctrain.UserError, match=r"Logging.log\('a', …\) was called outside of fit"):
        Logging().log("a", 1)
