"""Training state that a script forgets to save, and dicts of its own values."""

import time

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.optim.swa_utils import AveragedModel

import hpctrain
from hpctrain import Checkpointer
from hpctrain.rundir import RunDir
from hpctrain.telemetry.report.run_results import read_results

DATA = torch.utils.data.TensorDataset(torch.ones(16, 2))


class Parts:
    """The objects of a training loop."""

    def __init__(self, lr: float = 0.1) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        warm_up = LinearLR(self.optimizer, total_iters=2)
        rest = CosineAnnealingLR(self.optimizer, 6)
        self.scheduler = SequentialLR(self.optimizer, [warm_up, rest], [2])
        self.scaler = torch.amp.GradScaler("cpu")
        self.disabled = torch.amp.GradScaler("cpu", enabled=False)
        self.ema = AveragedModel(self.model)


def forgotten(output: str) -> list[str]:
    marker = "so a resumed run starts them anew: "
    return [line.split(marker)[1].split(". ")[0] for line in output.splitlines() if marker in line]


def run_session(folder, *names):
    parts = Parts()
    with hpctrain.session(run_dir=folder) as session:
        session.prepare(parts.model, parts.optimizer, *(getattr(parts, name) for name in names))
        for (batch,) in session.batches(DATA, global_batch_size=4, max_steps=2):
            session.backward(parts.model(batch).pow(2).mean())
            parts.optimizer.step()
            parts.optimizer.zero_grad()


def test_session_names_forgotten_objects(tmp_path, capsys):
    run_session(tmp_path / "some")
    (names,) = forgotten(capsys.readouterr().out)
    assert names == "parts.scheduler (SequentialLR), parts.scaler (GradScaler), parts.ema (AveragedModel)"
    run_session(tmp_path / "all", "scheduler", "scaler", "ema")
    assert forgotten(capsys.readouterr().out) == []


def test_checkpointer_names_forgotten_objects(tmp_path, capsys):
    parts = Parts()
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    sampler = hpctrain.StatefulBatchSampler(DATA, global_batch_size=4)
    Checkpointer(run_dir=tmp_path, model=parts.model, optimizer=parts.optimizer).load()
    (names,) = forgotten(capsys.readouterr().out)
    assert names == (
        "parts.scheduler (SequentialLR), parts.scaler (GradScaler), parts.ema (AveragedModel), other (SGD), "
        "sampler (StatefulBatchSampler)"
    )
    objects = {name: value for name, value in vars(parts).items() if name != "disabled"}
    Checkpointer(run_dir=tmp_path / "all", **objects, other=other, sampler=sampler).load()
    assert forgotten(capsys.readouterr().out) == []


class Net(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.schedule = CosineAnnealingLR(optimizer, 2)
        return optimizer


class Average(hpctrain.Callback):
    def __init__(self, module):
        self.ema = AveragedModel(module)


class SavedAverage(Average):
    def state_dict(self):
        return self.ema.state_dict()

    def load_state_dict(self, state):
        self.ema.load_state_dict(state)


class Layer(nn.Linear):
    """Counts, and measures what a resumed run need not know."""

    def __init__(self):
        super().__init__(2, 1)
        self.count, self.rate, self.size, self.seconds, self.cached = 0, 1.0, 0, 0.0, 0

    def forward(self, inputs):
        begun = time.perf_counter()
        self.count += 1
        self.rate = max(0.5, 0.9 * self.rate)
        self.size = len(inputs)
        self.cached = max(self.cached, len(inputs))
        output = super().forward(inputs)
        self.seconds += time.perf_counter() - begun
        return output


class SavedLayer(Layer):
    def get_extra_state(self):
        return {"count": self.count, "rate": self.rate}

    def set_extra_state(self, state):
        self.count, self.rate = state["count"], state["rate"]


class Calls(hpctrain.Callback):
    def __init__(self):
        self.calls = 0

    def on_step_end(self, trainer, module, metrics):
        self.calls += 1


class SavedCalls(Calls):
    def state_dict(self):
        return {"calls": self.calls}


class SetCalls(Calls):
    def on_fit_start(self, trainer, module):
        self.calls = trainer.step


class SavingNet(Net):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["count"] = self.layer.count


@pytest.mark.parametrize(
    ("net", "layer", "callback", "names"),
    [
        (Net, Layer, Calls, "Layer.count, Layer.rate, Calls.calls"),
        (Net, SavedLayer, Calls, "Calls.calls"),
        (Net, Layer, SetCalls, "Layer.count, Layer.rate"),
        (SavingNet, Layer, SavedCalls, None),
    ],
)
def test_trainer_names_numbers_that_are_not_saved(net, layer, callback, names, tmp_path, capsys):
    module = net()
    module.layer = layer()
    settings = {"checkpoint_every": 2, "global_batch_size": 4, "callbacks": [callback()]}
    hpctrain.Trainer(max_steps=6, run_dir=tmp_path, **settings).fit(module, DATA)
    output = capsys.readouterr().out
    message = f"which the checkpoints do not contain, so a resumed run starts them anew: {names}. Register"
    assert output.count("Training has changed") == output.count(message) == (names is not None)
    hpctrain.Trainer(max_steps=2, **settings).fit(module, DATA)  # nothing is saved
    assert "Training has changed" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", [Average, SavedAverage])
def test_trainer_names_forgotten_objects(kind, tmp_path, capsys):
    module = Net()
    average = kind(module)
    trainer = hpctrain.Trainer(max_steps=2, global_batch_size=4, run_dir=tmp_path, callbacks=[average])
    trainer.fit(module, DATA)
    (names,) = forgotten(capsys.readouterr().out)
    assert names.startswith("module.schedule (CosineAnnealingLR)")
    assert ("average.ema (AveragedModel)" in names) == (kind is Average)


def test_checkpointer_reports_ignored_values(tmp_path, capsys, monkeypatch):
    for lr, folder_steps in ((0.1, 1), (0.5, 2)):
        monkeypatch.setattr("sys.argv", ["train.py", "--lr", str(lr)])
        parts = Parts(lr)
        checkpointer = Checkpointer(
            run_dir=tmp_path, model=parts.model, optimizer=parts.optimizer, scheduler=parts.scheduler
        )
        checkpointer.load()
        parts.optimizer.step()
        parts.scheduler.step()
        checkpointer.save(folder_steps)
    output = capsys.readouterr().out
    assert "lr remains 0.1, the value in the checkpoint, although the script now sets 0.5." in output
    assert output.count("remains") == 1
    assert read_results(RunDir(tmp_path)).hparams["lr"] == 0.1


def test_rate_that_the_loop_sets_is_not_reported(tmp_path, capsys):
    for step in range(3):
        parts = Parts()
        checkpointer = Checkpointer(run_dir=tmp_path, model=parts.model, optimizer=parts.optimizer)
        assert checkpointer.load() == step
        parts.optimizer.param_groups[0]["lr"] = 0.1 / (step + 2)
        checkpointer.save(step + 1)
    assert "remains" not in capsys.readouterr().out


def test_values_of_a_dict_are_restored(tmp_path):
    progress = {"best": 0.0, "epoch": 0}
    checkpointer = Checkpointer(run_dir=tmp_path, progress=progress)
    checkpointer.load()
    progress["best"] = 0.75
    checkpointer.save(1)
    progress = {"best": 0.0, "epoch": 0}
    assert Checkpointer(run_dir=tmp_path, progress=progress).load() == 1
    assert progress == {"best": 0.75, "epoch": 0}
