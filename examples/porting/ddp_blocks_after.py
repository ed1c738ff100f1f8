"""Fit a sine with plain DDP: the script with a sampler, a checkpointer and a coordinated stop."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import hpctrain

dist.init_process_group("gloo")
torch.manual_seed(1)
x = torch.linspace(-3, 3, 1024).unsqueeze(1)
data = TensorDataset(x, x.sin())
model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

sampler = hpctrain.StatefulBatchSampler(data, global_batch_size=64, seed=1)
loader = DataLoader(data, batch_sampler=sampler)
checkpointer = hpctrain.Checkpointer(model=model, optimizer=optimizer, sampler=sampler)
checkpointer.load()
for epoch in range(sampler.epoch, 20):
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if hpctrain.should_stop():
            checkpointer.save_and_exit(sampler.step)
    checkpointer.save(sampler.step)
    hpctrain.log_metrics({"loss": loss}, sampler.step, epoch=epoch)
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss.item():.5f}")
dist.destroy_process_group()
