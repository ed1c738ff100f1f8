"""Training with `fully_shard`: saving, and resuming on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_on_ranks
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.training.module import Module
from hpctrain.training.observe.loss_guard import LossGuard
from hpctrain.training.optim.optimizer_setup import configure_optimizers_of
from hpctrain.training.trainer_config import TrainerConfig
from hpctrain.training.training_state import TrainingState

pytestmark = pytest.mark.ranks


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    def configure_optimizers(self):
        decayed, others = [self.net[0].weight, self.net[2].bias], [self.net[0].bias, self.net[2].weight]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        return torch.optim.AdamW(groups, lr=0.01)


class NoData:
    """A data position without state."""

    def identity(self):
        return {}

    def state_dict(self):
        return {}

    def load_state_dict(self, _):
        return []


def to_full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def make_table() -> sharded_tensor.ShardedTensor:
    """Six numbered rows, the same number on every rank."""
    rank, rows = dist.get_rank(), 6 // dist.get_world_size()
    local = torch.arange(rank * rows * 4, (rank + 1) * rows * 4, dtype=torch.float64).reshape(rows, 4)
    shard = sharded_tensor.Shard.from_tensor_and_offsets(local, [rank * rows, 0], rank)
    return sharded_tensor.init_from_local_shards([shard], 6, 4)


def train_from_newest(folder: Path, last_step: int) -> list[float]:
    """Resume from the newest checkpoint; return sums of squares of weights and optimizer state."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = Net()
    if world_size > 1:
        for layer in (module.net[0], module.net[2]):
            fully_shard(layer)
        fully_shard(module)
    guard = LossGuard(TrainerConfig(max_steps=1), has_scaler=False)
    state = TrainingState(module, configure_optimizers_of(module), NoData(), guard)
    store = CheckpointStore(folder, dist.group.WORLD)
    like = {**state.template(), "table": make_table()}
    loaded, broken = store.load_newest(like)
    assert broken == []
    if loaded is not None:
        rows = loaded.state["table"].local_shards()[0].tensor
        assert torch.equal(rows, like["table"].local_shards()[0].tensor)
        state.load(loaded)
    (optimizer,) = state.optimizers
    for step in range(state.step + 1, last_step + 1):
        batch = torch.randn(12, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        module.net(batch.chunk(world_size)[rank]).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        state.step = step
    sharded = [
        isinstance(value, DTensor) for tensors in optimizer.state.values() for value in tensors.values()
    ]
    assert any(sharded) == (world_size > 1), "the optimizer state is sharded as its parameter is"
    store.async_save(last_step, {**state.tree(), "table": make_table()}, {})
    assert store.close() == []
    sums = [to_full_tensor(parameter).pow(2).sum().item() for parameter in module.parameters()]
    for tensors in optimizer.state.values():
        sums += [
            to_full_tensor(tensors[name]).pow(2).sum().item() for name in ("step", "exp_avg", "exp_avg_sq")
        ]
    return sums


@pytest.mark.extended
@pytest.mark.parametrize("world_sizes", [(2, 1, 2), (1, 2, 2), (2, 3, 1)])
def test_sharded_training_resumes_on_other_numbers_of_ranks(tmp_path, world_sizes):
    (whole,) = run_on_ranks(train_from_newest, tmp_path / "whole", 9, world_size=1)
    for last_step, world_size in zip((3, 6, 9), world_sizes, strict=True):
        parts, *_ = run_on_ranks(train_from_newest, tmp_path / "parts", last_step, world_size=world_size)
    assert parts == pytest.approx(whole, rel=1e-9)
