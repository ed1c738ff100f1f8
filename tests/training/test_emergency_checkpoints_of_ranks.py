"""Emergency checkpoints of ranks on separate nodes, whose memory is a folder of each rank."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_on_ranks
from torch import nn
from torch.nn import functional as F

import hpctrain
from hpctrain.files import read_json_lines
from hpctrain.rundir import ATTEMPT_VARIABLE, EMERGENCY_CHECKPOINT_VARIABLE, RunDir, list_checkpoint_steps
from hpctrain.runtime.program.emergency_save import emergency_save
from hpctrain.training.saving import emergency_checkpoints

LAST_STEP, FAILED_STEP = 12, 8

pytestmark = pytest.mark.ranks


class Net(hpctrain.Module):
    """Batch norm, dropout, and an optimizer with a schedule."""

    def __init__(self, failed_step: int | None = None) -> None:
        super().__init__()
        self.failed_step, self.step = failed_step, 0
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch), batch.sum(1, keepdim=True))
        if batch_idx + 1 == self.failed_step:
            raise RuntimeError("Connection closed by peer")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LAST_STEP)


def train(folder: Path, attempt: int, failed_step: int | None = None, request: str | None = None) -> Net:
    """Train as a rank of its own node."""
    rank = os.environ["RANK"]
    memory = folder / f"memory-{rank}"
    memory.mkdir(exist_ok=True)
    emergency_checkpoints._SHARED_MEMORY = memory
    os.environ |= {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": rank,
        "GROUP_WORLD_SIZE": "2",
        ATTEMPT_VARIABLE: str(attempt),
    }
    if request is not None:
        os.environ[EMERGENCY_CHECKPOINT_VARIABLE] = request
    emergency_save.is_available = True
    net = Net(failed_step)
    data = torch.randn(96, 3, generator=torch.Generator().manual_seed(2))
    settings = {"max_steps": LAST_STEP, "global_batch_size": 8, "checkpoint_every": 3, "seed": 4}
    hpctrain.Trainer(run_dir=folder / "run", gradient_clip_norm=1.0, **settings).fit(net, data)
    return net


def train_undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    return train(folder, 0).state_dict()


def fail_and_save(folder: Path, saver: int) -> dict[str, object] | None:
    """Fail on all ranks in the same step; one of them saves its state. Return the supervisor's request."""
    with pytest.raises(RuntimeError, match="closed by peer"):
        train(folder, 0, FAILED_STEP)
    rank = int(os.environ["RANK"])
    if rank != saver:
        return None
    answer = emergency_save.handle(rank, {"freeze_state": True})
    assert answer is not None
    saved = emergency_save.handle(rank, {"save_state": rank})
    assert saved is not None
    assert "path" in saved["saved_state"], saved
    state = {name: value for name, value in answer["frozen_state"].items() if name != "folder"}
    return {**state, "attempt": 0, "world_size": 2}


def resume(folder: Path, request: dict[str, object]) -> tuple[dict[str, torch.Tensor], list[str]]:
    net = train(folder, 1, request=json.dumps(request))
    return net.state_dict(), sorted(map(str, (folder / f"memory-{os.environ['RANK']}").rglob("*")))


@pytest.mark.parametrize("saver", [0, 1])
def test_state_of_one_node_continues_the_training_bit_for_bit(tmp_path, saver):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    expected, _ = run_on_ranks(train_undisturbed, tmp_path / "one")
    request = run_on_ranks(fail_and_save, tmp_path / "two", saver)[saver]
    assert request["step"] == FAILED_STEP - 1
    (result, files), (_, files_1) = run_on_ranks(resume, tmp_path / "two", request)
    for name, tensor in expected.items():
        torch.testing.assert_close(result[name], tensor, rtol=0, atol=0, msg=name)
    one, two = (RunDir(tmp_path / name / "run") for name in ("one", "two"))
    assert [event["step"] for event in two.read_events() if event["kind"] == "resumed"] == [FAILED_STEP - 1]
    values = [
        [(line["step"], line["loss"], line["grad_norm"]) for line in read_json_lines(run.metrics)]
        for run in (one, two)
    ]
    assert values[0] == values[1]
    assert files == files_1 == []


def lose_record(folder: Path, request: dict[str, object]) -> None:
    """Resume without the record of rank 1."""
    if os.environ["RANK"] == "1":
        (record,) = (folder / "memory-1").rglob("record-000-00001")
        record.unlink()
    train(folder, 1, request=json.dumps(request))


def test_without_the_record_of_a_rank_the_newest_checkpoint_is_loaded(tmp_path):
    request = run_on_ranks(fail_and_save, tmp_path, 0)[0]
    run = RunDir(tmp_path / "run")
    newest = max(list_checkpoint_steps(run.checkpoints))
    assert newest < request["step"]
    run_on_ranks(lose_record, tmp_path, request)
    assert [event["step"] for event in run.read_events() if event["kind"] == "resumed"] == [newest]
