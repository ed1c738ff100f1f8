"""Lightning with hpctrain's Trainer ends with the parameters of an undisturbed run."""

from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import chain
from typing import Any

import pytest
import torch
from helpers.disturbed_runs import assert_resumed, assert_same_bits, log_of, train
from helpers.ranks import run_on_ranks
from torch.utils.data import DataLoader

from hpctrain.rundir import RUN_DIR_VARIABLE

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.extended,  # each run imports Lightning
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Four epochs of six batches, with three steps of the optimizer each."""
    return train(tmp_path_factory.mktemp("undisturbed"), "train_with_lightning.py")


@pytest.mark.parametrize("disturb", [pytest.param("requeue:6", marks=pytest.mark.long), "kill:5"])
def test_disturbed_run_is_bitwise_identical(disturb, undisturbed, tmp_path):
    """Step 6 is the last of an epoch, so that validation and the end of the epoch come before the stop."""
    run, result = train(tmp_path, "train_with_lightning.py", disturb=disturb)
    assert_resumed(run, disturb)
    assert_same_bits(result, undisturbed[1])
    # Lightning's warning contradicts the exact resume.
    assert "not resumable" not in log_of(run)


def test_trainer_uses_ranks_and_folder_of_the_job(undisturbed):
    run, result = undisturbed
    # With 8 samples per batch of two ranks, 46 samples are 3 steps.
    assert result[-1] == 12
    assert log_of(run).count("`Trainer.fit` stopped: `max_epochs=4` reached") == 1
    names = sorted(path.name for path in run.dir.checkpoints.iterdir())
    assert names == ["lightning-10", "lightning-12", "lightning-8"]
    assert run.status()["state"] == "COMPLETED"


def make_recorder(on_batch: Callable[[torch.Tensor], None]) -> Any:
    """Return a module that calls `on_batch` in each training step."""
    import lightning

    class Recorder(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch, batch_idx):
            on_batch(batch)
            return self.layer(batch[:, None].float()).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    return Recorder()


QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}


def train_recorded(max_steps: int, own_sampler: bool) -> list[list[int]]:
    """Train from the newest checkpoint to this step; return the samples of each step on this rank."""
    import hpctrain
    from hpctrain.lightning import Trainer

    steps = []

    data = list(range(30))
    if own_sampler:
        loader = DataLoader(data, batch_sampler=hpctrain.StatefulBatchSampler(data, 12, seed=3))
    else:
        loader = DataLoader(data, batch_size=4, shuffle=True)
    recorder = make_recorder(lambda batch: steps.append(batch.tolist()))
    Trainer(max_steps=max_steps, max_epochs=-1, **QUIET).fit(recorder, loader)
    return steps


def train_on_stateful_loader(fails_at: int | None) -> list[list[int]]:
    """Train to step 11, in the second epoch; return the samples and a random number of each step."""
    import lightning
    from torchdata.stateful_dataloader import StatefulDataLoader

    from hpctrain.lightning import RunCheckpoint, Trainer

    steps = []

    def on_batch(batch: torch.Tensor) -> None:
        steps.append([*batch.tolist(), int(torch.randint(1000, ()))])
        if len(steps) == fails_at:
            raise RuntimeError("failed")

    lightning.seed_everything(1)
    loader = StatefulDataLoader(list(range(30)), batch_size=4, shuffle=True)
    callbacks = [RunCheckpoint(every_n_train_steps=3)]
    trainer = Trainer(max_steps=11, max_epochs=-1, callbacks=callbacks, **QUIET)
    with pytest.raises(RuntimeError, match="failed") if fails_at else nullcontext():
        trainer.fit(make_recorder(on_batch), loader)
    return steps


def test_stateful_loader_continues_with_the_next_batch(tmp_path):
    def train_in(folder: str, fails_at: int | None = None) -> list[list[int]]:
        env = {RUN_DIR_VARIABLE: str(tmp_path / folder)}
        return run_on_ranks(train_on_stateful_loader, fails_at, world_size=1, env=env, group=False)[0]

    whole = train_in("whole")
    assert len(whole) == 11
    failed = train_in("failed", 5)
    assert failed == whole[:5]
    assert train_in("failed") == whole[3:]


def train_on_uneven_batches(num_samples: int, batch_size: int) -> float:
    """Train a weight whose gradient is the mean of the samples; return the weight after an epoch."""
    import lightning

    from hpctrain.lightning import Trainer

    class Mean(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def training_step(self, batch, batch_idx):
            return (self.weight * batch.float()).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Mean()
    loader = DataLoader(list(range(num_samples)), batch_size=batch_size)
    Trainer(max_epochs=1, **QUIET).fit(module, loader)
    return module.weight.item()


@pytest.mark.parametrize("num_samples", [9, 7])
def test_gradient_is_the_mean_over_the_samples_of_all_ranks(num_samples, tmp_path):
    """The last batch has 3 samples or 1, so that the ranks have 2 and 1, or 1 and a spare one."""
    env = {RUN_DIR_VARIABLE: str(tmp_path)}
    weights = run_on_ranks(train_on_uneven_batches, num_samples, 3, world_size=2, env=env)
    samples = torch.arange(num_samples).float()
    expected = -sum(batch.mean().item() for batch in samples.split(6))
    assert weights == [pytest.approx(expected)] * 2


@pytest.mark.long
def test_resized_run_has_the_same_samples_with_a_stateful_batch_sampler(tmp_path):
    def train_on(world_size: int, run: str, max_steps: int) -> list[list[int]]:
        env = {RUN_DIR_VARIABLE: str(tmp_path / run)}
        ranks = run_on_ranks(train_recorded, max_steps, True, world_size=world_size, env=env)
        return [sorted(chain(*step)) for step in zip(*ranks, strict=True)]

    # Step 4 is in the second epoch.
    whole = train_on(1, "whole", 7)
    assert len(whole) == 7
    assert train_on(3, "resized", 4) + train_on(2, "resized", 7) == whole


@pytest.mark.long
def test_resized_run_with_lightnings_sampler_is_refused(tmp_path):
    env = {RUN_DIR_VARIABLE: str(tmp_path)}
    run_on_ranks(train_recorded, 2, False, world_size=2, env=env)
    with pytest.raises(AssertionError, match="global_batch_size"):
        run_on_ranks(train_recorded, 4, False, world_size=1, env=env)


@pytest.mark.long
def test_lightning_cli_accepts_the_trainer(tmp_path):
    pytest.importorskip("jsonargparse")
    options = ["fit", "--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    run, steps = train(tmp_path, "train_with_lightning.py", *options, disturb="kill:10")
    assert (len(run.dir.attempts()), steps) == (2, 64)
    # LightningCLI refuses to overwrite it by itself.
    assert (run.path / "config.yaml").exists()
    assert (run.dir.checkpoints / "lightning-64").exists()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(8))


def train_on_loader(replaceable: bool) -> None:
    from hpctrain.lightning import Trainer

    data = list(range(8)) if replaceable else Stream()
    Trainer(max_steps=1, **QUIET).fit(make_recorder(lambda _: None), DataLoader(data, batch_size=2))


@pytest.mark.parametrize("replaceable", [True, False])
def test_position_that_cannot_be_restored_is_noted_on_rank_0(replaceable, tmp_path):
    env = {RUN_DIR_VARIABLE: str(tmp_path)}
    outputs = run_on_ranks(train_on_loader, replaceable, env=env, returns_output=True)
    message = "the position of the training loader, a DataLoader with the sampler _Infinite"
    assert [message in output for output in outputs] == [not replaceable, False]


def train_with_schedule(lr: float, period: int, max_steps: int) -> None:
    """Train six steps per epoch."""
    from torch.optim.swa_utils import AveragedModel

    from hpctrain.lightning import Trainer

    class Scheduled(type(make_recorder(lambda _: None))):
        num_steps = 0

        def training_step(self, batch, batch_idx):
            self.num_steps += 1
            return super().training_step(batch, batch_idx)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=lr, momentum=0.9)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, period)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    module = Scheduled()
    ema = AveragedModel(module)
    trainer = Trainer(max_steps=max_steps, max_epochs=-1, **QUIET)
    trainer.fit(module, DataLoader(list(range(24)), batch_size=4, shuffle=True))
    del ema


def test_differences_of_a_resumed_run_are_reported(tmp_path):
    def output_of(*arguments: Any) -> str:
        options = {"env": {RUN_DIR_VARIABLE: str(tmp_path)}, "returns_output": True}
        return run_on_ranks(train_with_schedule, *arguments, world_size=1, group=False, **options)[0]

    first = output_of(0.1, 4, 4)
    assert "so a resumed run starts them anew: ema (AveragedModel). " in first
    assert "so a resumed run starts them anew: Scheduled.num_steps. " in first
    assert "remains" not in first
    second = output_of(0.5, 8, 8)
    assert "lr remains 0.1, the value in the checkpoint, although the script now sets 0.5." in second
    assert "T_max of CosineAnnealingLR remains 4, the value in the checkpoint, although the" in second
    assert "CosineAnnealingLR ends after step 4 (T_max=4, the value in the checkpoint" in second
    assert second.count("remains") == 2
    assert "not resumable" not in second
