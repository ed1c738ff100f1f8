"""Train in float64: `train_in_float64.py LAST_STEP BATCH [SETTING=VALUE…]`; print all ranks' parameters.

With `own_loop=RANK:STEP`, train with a session, in which that rank gets SIGTERM; print the steps, too.
"""

import json
import multiprocessing
import os
import signal
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


def train_in_own_loop(module: Exact, max_steps: int, stop_at: str) -> int:
    optimizer, scheduler = module.configure_optimizers()
    num_steps = 0
    with hpctrain.session(seed=3, checkpoint_every=4, record_samples=True) as s:
        model, optimizer, scheduler = s.prepare(module.net, optimizer, scheduler)
        for x, y in s.batches(samples(), global_batch_size=5, max_steps=max_steps):
            loss = (model(x) - y).pow(2).mean()
            s.backward(loss)
            s.log(loss=loss, lr=scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            num_steps += 1
            if stop_at == f"{s.ranks.rank}:{s.step + 1}":
                os.kill(os.getpid(), signal.SIGTERM)
        assert s.step == max_steps
    return num_steps


if __name__ == "__main__":
    # As in a normally started script; a process of a fork server would fork its own from another server.
    multiprocessing.set_start_method("fork", force=True)
    options = dict(word.split("=", 1) for word in sys.argv[3:])
    data = DATA[options.pop("data", "tensors")]()
    module = Exact(json.loads(options.pop("overflow_at", "null")))
    last_step, num_steps = int(sys.argv[1]), None
    if "own_loop" in options:
        num_steps = train_in_own_loop(module, last_step, options["own_loop"])
    else:
        settings = {name: json.loads(value) for name, value in options.items()}
        settings |= {"max_steps": last_step, "global_batch_size": int(sys.argv[2])}
        trainer = hpctrain.Trainer(seed=3, record_samples=True, **settings)
        trainer.fit(module, tuple(data) if isinstance(data, list) else data)
    parameters = torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()
    all_parameters = [parameters]
    if dist.is_initialized():
        all_parameters *= dist.get_world_size()
        dist.all_gather_object(all_parameters, parameters)
    if os.environ.get("RANK", "0") == "0":
        result = {"parameters": all_parameters, "steps": num_steps}
        print(json.dumps(result if num_steps is not None else all_parameters))
