"""Train in float64: `train_in_float64.py LAST_STEP BATCH [SETTING=VALUE…]`; print all ranks' parameters."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys

import torch
import torch.distributed as dist
from helpers import iterable_datasets
from torch import nn

import hpctrain

NUM_SAMPLES = 23


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(NUM_SAMPLES, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return x, x.sum(1, keepdim=True).sin()


class Exact(hpctrain.Module):
    """Takes samples, or the numbers of samples from a stream."""

    def __init__(self, overflow_at: int | None = None) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        for i, parameter in enumerate(self.parameters()):
            nn.init.normal_(parameter, generator=torch.Generator().manual_seed(i))
        self.overflow_at = overflow_at

    def training_step(self, batch, batch_idx):
        if isinstance(batch, torch.Tensor):  # shard and index in it
            numbers = (batch[:, 0] * 7 + batch[:, 1]) % NUM_SAMPLES
            batch = tuple(column[numbers] for column in samples())
        x, y = batch
        loss = (self.net(x) - y).pow(2).mean()
        if self.overflow_at is not None and (x == samples()[0][self.overflow_at]).all(1).any():
            loss = loss * torch.finfo(torch.float64).max * 1e9
        return {"loss": loss, "lr": self.optimizer.param_groups[0]["lr"]}

    def configure_optimizers(self):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.9)
        return self.optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 12)


DATA = {
    "tensors": lambda: samples(),
    "shards": lambda: iterable_datasets.ShardedDataset([7, 0, 4, 12]),
    "stream": lambda: iterable_datasets.StatefulDataset(NUM_SAMPLES),
    "older copy on rank 1": lambda: [x[: NUM_SAMPLES - int(os.environ.get("RANK", 0))] for x in samples()],
}

if __name__ == "__main__":
    # As in a normally started script; a process of a fork server would fork its own from another server.
    multiprocessing.set_start_method("fork", force=True)
    options = dict(word.split("=", 1) for word in sys.argv[3:])
    data = DATA[options.pop("data", "tensors")]()
    module = Exact(json.loads(options.pop("overflow_at", "null")))
    settings = {name: json.loads(value) for name, value in options.items()}
    trainer = hpctrain.Trainer(
        max_steps=int(sys.argv[1]),
        global_batch_size=int(sys.argv[2]),
        seed=3,
        record_samples=True,
        **settings,
    )
    trainer.fit(module, tuple(data) if isinstance(data, list) else data)
    parameters = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    all_parameters = [parameters] * trainer.ranks.world_size
    if dist.is_initialized():
        dist.all_gather_object(all_parameters, parameters)
    if trainer.is_main:
        print(json.dumps(all_parameters))
