"""A plain DDP loop with the building blocks: dropout, data workers, an uneven last batch."""

import os
import sys

import torch
import torch.distributed as dist
from disturbance import after_step
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hpctrain


class Net(nn.Sequential):
    """Layers that are registered in reverse, so that DDP regroups their gradients after the first step."""

    def forward(self, x):
        for layer in reversed(self):
            x = layer(x)
        return x


def main(num_epochs: int, stop_at: int | None = None, run_dir: str | None = None) -> list[torch.Tensor]:
    """Train; with `stop_at`, save after that step and return."""
    torch.manual_seed(1)
    x = torch.linspace(-3, 3, 43).unsqueeze(1)
    data = TensorDataset(x, x.sin())
    net = Net(nn.Linear(32, 1), nn.Linear(32, 32), nn.Dropout(0.2), nn.Tanh(), nn.Linear(1, 32))
    if "NO_DROPOUT" in os.environ:
        net.eval()
    model = nn.parallel.DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)

    torch.manual_seed(int(os.environ["RANK"]))
    sampler = hpctrain.StatefulBatchSampler(data, global_batch_size=8, seed=1)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=int(os.environ.get("NUM_WORKERS", "1")))
    checkpointer = hpctrain.Checkpointer(
        run_dir=run_dir, model=model, optimizer=optimizer, schedule=schedule, sampler=sampler
    )
    step = checkpointer.load()
    for epoch in range(sampler.epoch, num_epochs):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            (loss * sampler.weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            step += 1
            hpctrain.log_metrics({"loss": loss}, step, epoch=epoch, last_step=6 * num_epochs)
            if step % 4 == 0:
                checkpointer.async_save(step)
            after_step(step)
            if step == stop_at:
                checkpointer.save(step)
                return []
            if hpctrain.should_stop():
                checkpointer.save_and_exit(step)
    return [parameter.detach() for parameter in net.parameters()]


if __name__ == "__main__":
    dist.init_process_group("gloo")
    parameters = main(4)
    if dist.get_rank() == 0:
        torch.save(parameters, sys.argv[1])
    dist.barrier()
