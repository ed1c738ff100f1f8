"""A loop with torchft: each replica is a job of its own, and the others continue without a lost one."""

from __future__ import annotations

import os
from datetime import timedelta
from itertools import islice

import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
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

TIMEOUT = timedelta(seconds=10)


def train(replica: int, num_replicas: int) -> None:
    net = Net()
    optimizer = adam(net.parameters())

    def load_state_dict(state) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict():
        return {"net": net.state_dict(), "optimizer": optimizer.state_dict()}

    manager = Manager(
        ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict,
        state_dict,
        min_replica_size=1,
        timeout=TIMEOUT,
        replica_id=f"replica-{replica}",
    )
    newest = checkpoints / "state.pt"
    if newest.exists():
        state = torch.load(newest)
        load_state_dict(state)
        manager.load_state_dict(state["manager"])
    parallel, updates = DistributedDataParallel(manager, net), Optimizer(manager, optimizer)
    samples = Samples()
    sampler = DistributedSampler(samples, num_replicas=num_replicas, rank=replica, seed=1)
    loader = DataLoader(samples, batch_size=GLOBAL_BATCH // num_replicas, sampler=sampler)
    while (step := manager.current_step()) < NUM_STEPS:
        epoch, seen = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for batch in islice(loader, seen, None):
            updates.zero_grad()
            loss_of(parallel, batch).backward()
            updates.step()
            is_committed = manager.current_step() == step + 1
            if is_committed:
                step += 1
                record_step(step, batch[1].tolist(), replica)
                if step % SAVE_EVERY == 0 and replica == 0:
                    torch.save({**state_dict(), "manager": manager.state_dict()}, checkpoints / "state.new")
                    os.replace(checkpoints / "state.new", newest)
            if not is_committed or step == NUM_STEPS:
                break  # continue with the batches of the manager's step, which may be another one
    if replica == 0:
        record_result(net)
    manager.shutdown()


if __name__ == "__main__":
    train(int(os.environ["REPLICA"]), int(os.environ["NUM_REPLICAS"]))
