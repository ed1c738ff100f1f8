"""What cannot be trained, or not as it is asked, is refused before the first step, with the reason."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from train_regression import Regression, samples

import hpctrain
from hpctrain.rundir import RunDir
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.dataset_adapters import make_step_source
from hpctrain.training.data.loader_config import LoaderConfig
from hpctrain.training.data.step_source import StopCondition


@pytest.mark.parametrize(("data", "settings"), [((), {}), ((samples(),), {"validate_every": None})])
def test_early_stopping_without_validations_is_refused(data, settings):
    trainer = hpctrain.Trainer(max_steps=1, callbacks=hpctrain.EarlyStopping("val_f1"), **settings)
    with pytest.raises(hpctrain.UserError, match="monitors 'val_f1', but there is no validation"):
        trainer.fit(Regression(), samples(), *data)


def test_a_wrong_metric_is_answered_with_those_that_there_are(tmp_path):
    class Model(Regression):
        def validation_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).detach()

    stopping = hpctrain.EarlyStopping("val_los")
    trainer = hpctrain.Trainer(max_steps=9, run_dir=tmp_path, callbacks=stopping)
    with pytest.raises(hpctrain.UserError, match=r"'val_los', but the validation returned only: val_loss\.$"):
        trainer.fit(Model(), samples(), samples())


@pytest.mark.parametrize(
    "settings", [{"callbacks": hpctrain.EarlyStopping("nope")}, {"keep_best": 1, "monitor": "val_nope"}]
)
def test_a_metric_that_no_validation_gives_is_said_before_the_first_step(tmp_path, settings):
    class Model(Regression):
        def validation_step(self, batch, batch_idx):
            return {"f1": super().training_step(batch, batch_idx).detach()}

    trainer = hpctrain.Trainer(max_steps=9, run_dir=tmp_path, **settings)
    with pytest.raises(hpctrain.UserError, match="nope', but the validation returned only: f1"):
        trainer.fit(Model(), samples(), samples())
    assert not RunDir(tmp_path).metrics.exists()


class Foreign(Regression):
    """Its head is another one by now."""

    def configure_optimizers(self):
        return torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)


class Second(Regression):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (nn.Linear(1, 1), "a Linear, which has no configure_optimizers"),
        (Foreign(), "none of the module's 4 trainable parameters"),
        (Second(), "returned an LBFGS"),
    ],
    ids=["no Module", "foreign", "LBFGS"],
)
def test_what_cannot_be_trained_is_refused(module, words):
    with pytest.raises(hpctrain.UserError, match=words):
        hpctrain.Trainer(max_steps=1).fit(module, samples())


def test_a_loader_is_no_data_set():
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), batch_size=5)
    with pytest.raises(hpctrain.UserError, match=r"train_dataset is a DataLoader; pass its TensorDataset"):
        hpctrain.Trainer(max_steps=1).fit(Regression(), loader)
    with pytest.raises(hpctrain.UserError, match="val_dataset is a DataLoader"):
        hpctrain.Trainer(max_steps=1).fit(Regression(), samples(), loader)


def test_a_checkpoint_of_another_optimizer_is_said_to_be_one(tmp_path):
    class WithAdam(Regression):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    hpctrain.Trainer(max_steps=1, run_dir=tmp_path).fit(Regression(), samples())
    with pytest.raises(
        hpctrain.UserError,
        match=r"the optimizer in the checkpoint has .*momentum.*, the optimizer of the script has .*betas",
    ):
        hpctrain.Trainer(max_steps=2, run_dir=tmp_path).fit(WithAdam(), samples())


@pytest.mark.parametrize("metric", ["", None])
def test_early_stopping_goes_by_a_name(metric):
    with pytest.raises(hpctrain.UserError, match="must be the name of a metric"):
        hpctrain.EarlyStopping(metric)


@pytest.mark.parametrize(
    "wrong",
    [
        {"gradient_clip_norm": 0},
        {"gradient_clip_value": "1"},
        {"warmup_steps": -1},
        {"sanity_val_batches": None},
        {"lr_reference_batch_size": 0},
        {"lr_scaling": "cubic"},
        {"callbacks": [print]},
        {"seed": "1"},
        {"seed": 2**70},
        {"compile": "max"},
        {"compile": {"mod": "max-autotune"}},
        {"global_batch_size": True},
        {"global_batch_size": None},
    ],
    ids=str,
)
def test_settings_out_of_their_range_are_refused(wrong):
    with pytest.raises(hpctrain.UserError, match=next(iter(wrong))):
        hpctrain.Trainer(max_steps=1, **wrong)


def test_a_pretended_rank_with_another_number_of_steps_is_told_of():
    team = SimpleNamespace(
        all_gather=lambda own: [own, {**own, "max_steps": 4}], ranks=SimpleNamespace(world_size=2)
    )
    with pytest.raises(
        hpctrain.UserError, match=r"'max_steps': 3.* on rank 0, but .*'max_steps': 4.* on rank 1"
    ):
        make_step_source(
            samples(),
            LoaderConfig(global_batch_size=4),
            DataRank(0, 2),
            team,
            StopCondition(3),
        )
