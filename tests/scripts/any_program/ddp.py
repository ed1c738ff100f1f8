"""A plain DDP loop with data workers, as a module with a relative import."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from .pace import STEPS, finish, folder, pace

dist.init_process_group("gloo")
torch.manual_seed(1)
layer = torch.nn.Linear(4, 1)
model, optimizer, step = DistributedDataParallel(layer), torch.optim.Adam(layer.parameters()), 0
path = os.path.join(folder(), "state.pt")
if os.path.exists(path):
    state = torch.load(path)
    layer.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
batches = iter(DataLoader(torch.ones(2 * STEPS, 4), batch_size=2, num_workers=2))
while step < STEPS:
    pace(step)
    model(next(batches)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 5 == 0 and dist.get_rank() == 0:
        state = {"model": layer.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
dist.destroy_process_group()
finish(step)
