"""Values of optimizers and schedulers, and dicts of the script, in the Checkpointer."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from hpctrain import Checkpointer
from hpctrain.rundir import RunDir
from hpctrain.telemetry.report.run_results import read_results


class Parts:
    """The objects of a training loop."""

    def __init__(self, lr: float = 0.1) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr)
        warm_up = LinearLR(self.optimizer, total_iters=2)
        rest = CosineAnnealingLR(self.optimizer, 6)
        self.scheduler = SequentialLR(self.optimizer, [warm_up, rest], [2])


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


def test_values_of_a_dict_are_restored(tmp_path):
    progress = {"best": 0.0, "epoch": 0}
    checkpointer = Checkpointer(run_dir=tmp_path, progress=progress)
    checkpointer.load()
    progress["best"] = 0.75
    checkpointer.save(1)
    progress = {"best": 0.0, "epoch": 0}
    assert Checkpointer(run_dir=tmp_path, progress=progress).load() == 1
    assert progress == {"best": 0.75, "epoch": 0}
