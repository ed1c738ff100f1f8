"""Fit a sine with plain DDP: the script before it is ported."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(1)
x = torch.linspace(-3, 3, 1024).unsqueeze(1)
data = TensorDataset(x, x.sin())
model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

sampler = DistributedSampler(data, seed=1)
loader = DataLoader(data, batch_size=32, sampler=sampler)
first_epoch = 0
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt")
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    first_epoch = state["epoch"]
for epoch in range(first_epoch, 20):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = F.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}
        torch.save(state, "checkpoint.pt")
        print(f"epoch {epoch}: loss {loss.item():.5f}")
dist.destroy_process_group()
