"""An Accelerate script that does not use hpctrain. It saves checkpoints in the folder given as an option.

python examples/accelerate_sine.py
srun --nodes=2 --ntasks-per-node=1 hpctrain exec -- python examples/accelerate_sine.py
hpctrain submit --nodes 2 --ntasks-per-node 1 --follow examples/accelerate_sine.py
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def newest(folder: Path) -> tuple[int, Path | None]:
    """Return the step of the newest checkpoint, and the checkpoint; 0 and None if there is none."""
    steps = [int(path.name.removeprefix("sine-")) for path in folder.glob("sine-*")]
    return (max(steps), folder / f"sine-{max(steps)}") if steps else (0, None)


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Write a new checkpoint, then remove the previous one: after a kill, at least one remains."""
    _, before = newest(folder)
    accelerator.save_state(folder / "unfinished")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.rename(folder / "unfinished", folder / f"sine-{step}")
        if before is not None:
            shutil.rmtree(before)
    accelerator.wait_for_everyone()


def main() -> None:
    # hpctrain sets the run folder; without hpctrain, files are in the current folder.
    folder = os.path.join(os.environ.get("HPCTRAIN_RUN_DIR", "."), "checkpoints")
    parser = argparse.ArgumentParser(description="Fit a sine with Accelerate.")
    parser.add_argument("--max-steps", type=int, default=500)
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--checkpoints", type=Path, default=folder)
    args = parser.parse_args()

    accelerator = Accelerator(
        # Without GPUs, Accelerate treats each rank as the only one, unless the CPU is requested explicitly.
        cpu=not torch.cuda.is_available(),
        # A sampler whose order depends only on the epoch number, so that a run can resume at any position.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )
    torch.manual_seed(1)
    x = torch.linspace(-3, 3, 2048).unsqueeze(1)
    data = DataLoader(TensorDataset(x, x.sin()), batch_size=64, shuffle=True)
    net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    model, optimizer, data = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=1e-2), data)

    step, checkpoint = newest(args.checkpoints)
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
        accelerator.print(f"continued after step {step} from {checkpoint}", flush=True)
    while step < args.max_steps:
        epoch, position = divmod(step, len(data))
        data.set_epoch(epoch)
        for x, y in accelerator.skip_first_batches(data, position):
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            step += 1
            if step % args.save_every == 0 or step == args.max_steps:
                save(accelerator, args.checkpoints, step)
                accelerator.print(f"step {step}: loss {loss.item():.5f}", flush=True)
            if step == args.max_steps:
                break
    accelerator.print(f"trained {step} steps", flush=True)
    accelerator.end_training()


if __name__ == "__main__":
    main()
