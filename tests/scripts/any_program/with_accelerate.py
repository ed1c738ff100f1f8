"""An Accelerate script."""

import os
import shutil

import torch
from accelerate import Accelerator
from pace import STEPS, finish, folder, pace

accelerator = Accelerator(cpu=True)
torch.manual_seed(1)
layer = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(layer, torch.optim.Adam(layer.parameters()))
saved = sorted(int(name) for name in os.listdir(folder()) if name.isdecimal())
step = saved[-1] if saved else 0
if saved:
    accelerator.load_state(os.path.join(folder(), str(step)))
while step < STEPS:
    pace(step)
    accelerator.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % 5 == 0:
        path = os.path.join(folder(), str(step))
        accelerator.save_state(f"{path}.tmp")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(path, ignore_errors=True)
            os.rename(f"{path}.tmp", path)
        accelerator.wait_for_everyone()
accelerator.end_training()
finish(step)
