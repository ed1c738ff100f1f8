"""Plugins save no state that has become NaN: the newest checkpoint remains the last finite one."""

import pytest
import torch
from helpers.ranks import run_on_ranks

from hpctrain.rundir import RUN_DIR_VARIABLE
from hpctrain.training.saving.library_checkpoints import LibraryCheckpoints

pytestmark = pytest.mark.ranks

#: Optimizer steps; from the loss of step 6 on, everything is NaN.
STEPS, BAD = 9, 6


class Net(torch.nn.Linear):
    """A layer whose loss is NaN in one step."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.calls = 0

    def loss(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self(inputs).mean() * (float("nan") if self.calls == BAD else 1.0)


def train_huggingface(output: str) -> None:
    from transformers import Trainer, TrainingArguments

    import hpctrain.huggingface

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, inputs):
            return {"loss": self.net.loss(inputs)}

    arguments = TrainingArguments(
        output,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_steps=2,
        save_total_limit=1,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    data = [{"inputs": torch.ones(1)} for _ in range(2 * STEPS)]
    hpctrain.huggingface.prepare(Trainer(Model(), arguments, train_dataset=data)).train()


@pytest.mark.extended
@pytest.mark.slow
def test_checkpoint_before_a_nan_remains_the_newest(tmp_path):
    pytest.importorskip("transformers")
    env = {RUN_DIR_VARIABLE: str(tmp_path)}
    run_on_ranks(train_huggingface, str(tmp_path / "out"), env=env, world_size=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["checkpoint-4"]


@pytest.mark.parametrize("part", ["parameter", "optimizer"])
def test_states_that_are_no_longer_finite_are_not_saved(part, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(RUN_DIR_VARIABLE, str(tmp_path))
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    checkpoints = LibraryCheckpoints("step", keep_last=1)
    checkpoints.watch(net, optimizer)
    checkpoints.save(2, lambda path: path.touch())
    spoiled = net.bias if part == "parameter" else optimizer.state[net.bias]["exp_avg"]
    spoiled.data[1] = torch.inf
    checkpoints.save(4, lambda path: path.touch())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]
    assert "after step 4, the optimizer state or the parameters contain NaN" in capfd.readouterr().out
    # Values that are infinite at the start do not prevent a save.
    checkpoints.watch(net, optimizer)
    checkpoints.save(6, lambda path: path.touch())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-6"]
