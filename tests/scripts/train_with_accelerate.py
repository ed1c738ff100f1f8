"""An Accelerate loop with dropout, accumulated gradients and data workers."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from disturbance import after_step
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hpctrain.accelerate import AcceleratorCheckpointer

LAST_STEP = 24


def main(result: str) -> None:
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    torch.manual_seed(1)
    x = torch.linspace(-3, 3, 46).unsqueeze(1)
    loader = DataLoader(TensorDataset(x, x.sin()), batch_size=4, shuffle=True, num_workers=1)
    net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)

    checkpointer = AcceleratorCheckpointer(accelerator, every_n_steps=4)
    step = checkpointer.load()
    while step < LAST_STEP:
        for inputs, targets in checkpointer.batches(loader, step):
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            step += 1
            after_step(step)
            checkpointer.save_if_due(step)
    if accelerator.is_main_process:
        torch.save([parameter.detach() for parameter in net.parameters()], result)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])
