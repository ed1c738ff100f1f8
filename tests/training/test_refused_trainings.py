"""Unsupported modules, data and settings are refused before the first step, with the reason."""

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
def test_early_stopping_without_validation_is_refused(data, settings):
    trainer = hpctrain.Trainer(max_steps=1, callbacks=hpctrain.EarlyStopping("val_f1"), **settings)
    with pytest.raises(hpctrain.UserError, match="monitors 'val_f1', but this run has no validation"):
        trainer.fit(Regression(), samples(), *data)


@pytest.mark.parametrize(
    "settings", [{"callbacks": hpctrain.EarlyStopping("nope")}, {"keep_best": 1, "monitor": "val_nope"}]
)
def test_missing_metric_is_reported_before_the_first_step(tmp_path, settings):
    class Model(Regression):
        def validation_step(self, batch, batch_idx):
            return {"f1": super().training_step(batch, batch_idx).detach()}

    trainer = hpctrain.Trainer(max_steps=9, run_dir=tmp_path, **settings)
    with pytest.raises(hpctrain.UserError, match="nope', but validation returned only these metrics: f1"):
        trainer.fit(Model(), samples(), samples())
    assert not RunDir(tmp_path).metrics.exists()


class Foreign(Regression):
    """The optimizer has the parameters of another head."""

    def configure_optimizers(self):
        return torch.optim.SGD(nn.Linear(3, 1).parameters(), lr=0.1)


class Second(Regression):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Linear(1, 1), "type Linear, which has no configure_optimizers"),
        (Foreign(), "without any of the 4 trainable parameters of the module"),
        (Second(), "returned an LBFGS"),
    ],
    ids=["no Module", "foreign", "LBFGS"],
)
def test_unsupported_module_is_refused(module, message):
    with pytest.raises(hpctrain.UserError, match=message):
        hpctrain.Trainer(max_steps=1).fit(module, samples())


def test_checkpoint_of_another_optimizer_is_reported(tmp_path):
    class WithAdam(Regression):
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    hpctrain.Trainer(max_steps=1, run_dir=tmp_path).fit(Regression(), samples())
    with pytest.raises(
        hpctrain.UserError,
        match=r"the optimizer in the checkpoint has .*momentum.*, but the optimizer of .* has .*betas",
    ):
        hpctrain.Trainer(max_steps=2, run_dir=tmp_path).fit(WithAdam(), samples())


def test_differing_numbers_of_steps_on_ranks_are_reported():
    group = SimpleNamespace(
        all_gather=lambda identity: [identity, {**identity, "max_steps": 4}],
        ranks=SimpleNamespace(world_size=2),
    )
    with pytest.raises(
        hpctrain.UserError, match=r"'max_steps': 3.* on rank 0, but .*'max_steps': 4.* on rank 1"
    ):
        make_step_source(
            samples(), LoaderConfig(global_batch_size=4), DataRank(0, 2), group, StopCondition(3)
        )
