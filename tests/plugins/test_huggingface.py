"""A prepared Hugging Face Trainer ends with the parameters of an undisturbed run."""

import os
from importlib.util import find_spec

import pytest
import torch
from helpers.disturbed_runs import assert_resumed, assert_same_bits, train
from helpers.ranks import run_on_ranks

from hpctrain.rundir import RUN_DIR_VARIABLE

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
    listed = run.hpctrain("checkpoints", str(run.path))
    assert "script's own format" in listed.stderr
    assert listed.stdout.endswith("checkpoint-16\n")
    assert (run.dir.checkpoints / "checkpoint-16" / "hpctrain-complete").exists()


def train_with_rate(lr: float, max_steps: int) -> None:
    from torch.optim.swa_utils import AveragedModel
    from transformers import Trainer, TrainingArguments

    import hpctrain.huggingface

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.num_calls = torch.nn.Linear(1, 1), 0

        def forward(self, x):
            self.num_calls += 1
            return {"loss": self.layer(x).square().mean()}

    model, data = Model(), [{"x": torch.ones(1)}] * 8
    ema = AveragedModel(model)
    settings = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_steps": 2}
    folder = f"{os.environ[RUN_DIR_VARIABLE]}/never-used"
    arguments = TrainingArguments(folder, max_steps=max_steps, learning_rate=lr, **settings)
    hpctrain.huggingface.prepare(Trainer(model, arguments, train_dataset=data)).train()
    del ema


@pytest.mark.extended
def test_differences_of_a_resumed_run_are_reported(tmp_path):
    def output_of(*arguments: float) -> str:
        options = {"env": {RUN_DIR_VARIABLE: str(tmp_path)}, "returns_output": True}
        return run_on_ranks(train_with_rate, *arguments, world_size=1, group=False, **options)[0]

    first = output_of(0.1, 2)
    assert "so a resumed run starts them anew: ema (AveragedModel). " in first
    assert "so a resumed run starts them anew: Model.num_calls. " in first
    assert "remains" not in first
    second = output_of(0.5, 4)
    assert "lr remains 0.1, the value in the checkpoint, although the script now sets 0.5." in second
