"""A loop with DistributedDataParallel that saves and resumes by itself, and skips the batches it has seen."""

from __future__ import annotations

import os
from itertools import islice

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from training import (
    GLOBAL_BATCH,
    NUM_STEPS,
    SAVE_EVERY,
    Net,
    Samples,
    adam,
    checkpoints,
    loss_of,
    record_result,
    record_step,
)


def train() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = Net()
    optimizer = adam(net.parameters())
    newest, first = checkpoints / "state.pt", 0
    if newest.exists():
        state = torch.load(newest)
        first = state["step"]
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    parallel = DistributedDataParallel(net)
    samples = Samples()
    sampler = DistributedSampler(samples, seed=1)
    loader = DataLoader(samples, batch_size=GLOBAL_BATCH // dist.get_world_size(), sampler=sampler)
    step = first
    while step < NUM_STEPS:
        epoch, seen = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for batch in islice(loader, seen, None):
            loss_of(parallel, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            record_step(step, batch[1].tolist(), rank)
            if step % SAVE_EVERY == 0 and rank == 0:
                state = {"step": step, "net": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(state, checkpoints / "state.new")
                os.replace(checkpoints / "state.new", newest)
            if step == NUM_STEPS:
                break
    if rank == 0:
        record_result(net)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
