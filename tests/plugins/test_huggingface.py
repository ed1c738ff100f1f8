"""A prepared Hugging Face Trainer ends with the parameters of an undisturbed run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from helpers.disturbed_runs import assert_resumed, assert_same_bits, train

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed"), "train_with_huggingface.py")


@pytest.mark.long
@pytest.mark.parametrize("disturb", ["requeue:8", "kill:7", "kill:9"])
def test_disturbed_run_is_bitwise_identical(disturb, undisturbed, tmp_path):
    """Step 8 is the last of an epoch, so that the evaluation comes before the stop, and before the save."""
    run, result = train(tmp_path, "train_with_huggingface.py", disturb=disturb)
    assert_resumed(run, disturb)
    assert_same_bits(result, undisturbed[1])


@pytest.mark.long
def test_trainer_saves_into_the_run_folder(undisturbed):
    run, result = undisturbed
    assert result[-1] == 16
    assert [event["step"] for event in run.events("checkpoint")] == [*range(2, 17, 2)]
    assert run.status()["checkpoint"] == str(run.dir.checkpoints / "checkpoint-16")
    listed = run.hpctrain("checkpoints", str(run.path)).stderr
    assert "The script's newest checkpoint is " in listed
    assert "checkpoint-16 (2" in listed
    assert (run.dir.checkpoints / "checkpoint-16" / "hpctrain-complete").exists()
