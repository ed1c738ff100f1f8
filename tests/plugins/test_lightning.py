"""Lightning with hpctrain's Trainer ends with the parameters of an undisturbed run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from helpers.disturbed_runs import assert_resumed, assert_same_bits, log_of, train

pytestmark = [
    pytest.mark.ranks,
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


def test_trainer_uses_ranks_and_folder_of_the_job(undisturbed):
    run, result = undisturbed
    # With 8 samples per batch of two ranks, 46 samples are 3 steps.
    assert result[-1] == 12
    assert log_of(run).count("`Trainer.fit` stopped: `max_epochs=4` reached") == 1
    names = sorted(path.name for path in run.dir.checkpoints.iterdir())
    assert names == ["lightning-10", "lightning-12", "lightning-8"]
    assert run.status()["state"] == "COMPLETED"


@pytest.mark.long
def test_lightning_cli_accepts_the_trainer(tmp_path):
    pytest.importorskip("jsonargparse")
    options = ["fit", "--trainer.max_epochs=2", "--trainer.accelerator=cpu", "--trainer.logger=false"]
    run, steps = train(tmp_path, "train_with_lightning_cli.py", *options, disturb="kill:10")
    assert (len(run.dir.attempts()), steps) == (2, 64)
    # LightningCLI refuses to overwrite it by itself.
    assert (run.path / "config.yaml").exists()
    assert (run.dir.checkpoints / "lightning-64").exists()
