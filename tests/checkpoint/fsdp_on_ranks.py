"""A module cut by `fully_shard`, or whole on one rank: `fsdp_on_ranks.py FOLDER LAST_STEP`.

It goes on from the newest checkpoint, and prints sums of squares of its weights and of what Adam keeps.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.training.module import Module
from hpctrain.training.optim.optimizer_setup import configure_optimizers_of
from hpctrain.training.training_state import TrainingState


class Net(Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()

    def configure_optimizers(self):
        decayed, others = [self.net[0].weight, self.net[2].bias], [self.net[0].bias, self.net[2].weight]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
        return torch.optim.AdamW(groups, lr=0.01)


class NoFeed:
    """A position that there is nothing to say of."""

    def identity(self):
        return {}

    def state_dict(self):
        return {}

    def load_state_dict(self, _):
        return []


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def table(rank: int, world_size: int) -> sharded_tensor.ShardedTensor:
    """Six rows, as many on every rank, numbered."""
    rows = 6 // world_size
    local = torch.arange(rank * rows * 4, (rank + 1) * rows * 4, dtype=torch.float64).reshape(rows, 4)
    shard = sharded_tensor.Shard.from_tensor_and_offsets(local, [rank * rows, 0], rank)
    return sharded_tensor.init_from_local_shards([shard], 6, 4)


def main() -> None:
    folder, last_step = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", **({} if "RANK" in os.environ else ALONE))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = Net()
    if world_size > 1:
        for layer in (module.net[0], module.net[2]):
            fully_shard(layer)
        fully_shard(module)
    state = TrainingState(module, configure_optimizers_of(module), NoFeed())
    store = CheckpointStore(folder, dist.group.WORLD)
    like = {**state.template(), "table": table(rank, world_size)}
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
    cut = [isinstance(value, DTensor) for kept in optimizer.state.values() for value in kept.values()]
    assert any(cut) == (world_size > 1), "what is kept of a parameter is cut as that is"
    store.begin(last_step, {**state.tree(), "table": table(rank, world_size)}, {})
    assert store.close() == []
    sums = [whole(parameter).pow(2).sum().item() for parameter in module.parameters()]
    for kept in optimizer.state.values():
        sums += [whole(kept[name]).pow(2).sum().item() for name in ("step", "exp_avg", "exp_avg_sq")]
    if rank == 0:
        print(sums)
    dist.barrier()
    dist.destroy_process_group()


ALONE = {"store": dist.HashStore(), "rank": 0, "world_size": 1}

if __name__ == "__main__":
    main()
