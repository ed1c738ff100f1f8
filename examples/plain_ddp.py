"""A plain PyTorch script: `env://` initialization, DDP, and its own checkpoint file.

hpctrain requires nothing else. The run may be preempted at any time. On SIGTERM, all ranks agree to stop,
rank 0 saves, and exit code 75 requests a continuation. The next attempt resumes from the file.

    python examples/plain_ddp.py
    torchrun --standalone --nproc-per-node 2 examples/plain_ddp.py
    hpctrain submit --nodes 2 --gpus-per-node 1 --follow examples/plain_ddp.py
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EXIT_CONTINUE = 75


def join() -> torch.device:
    """Join the other ranks, if any, and select the device of this rank."""
    device, backend = torch.device("cpu"), "gloo"
    if torch.cuda.is_available():
        # Slurm may show a rank only its own GPU, or all GPUs of the node.
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device, backend = torch.device("cuda", local_rank % torch.cuda.device_count()), "nccl"
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def save(path: str, state: dict) -> None:
    """Replace the file atomically: after a kill, the previous file remains."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    torch.save(state, path + ".tmp")
    os.replace(path + ".tmp", path)


def any_rank(flag: bool, device: torch.device) -> bool:
    """Return true if `flag` is set on any rank. All ranks must call this."""
    flags = torch.tensor(int(flag), device=device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags.item())


def main() -> None:
    # hpctrain sets the run folder; without hpctrain, the file is in the current folder.
    folder = os.path.join(os.environ.get("HPCTRAIN_RUN_DIR", "."), "checkpoints")
    parser = argparse.ArgumentParser(description="Fit a sine with plain PyTorch.")
    parser.add_argument("--max-steps", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step and rank")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--checkpoint", default=os.path.join(folder, "plain_ddp.pt"))
    args = parser.parse_args()

    stop_asked = False

    def ask_to_stop(*_: object) -> None:
        nonlocal stop_asked
        stop_asked = True

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGUSR2, ask_to_stop)

    device = join()
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1)).to(device))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint, map_location=device)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        if dist.get_rank() == 0:
            print(f"continued after step {step} from {args.checkpoint}", flush=True)

    stopping = False
    while step < args.max_steps and not stopping:
        # Seeded by step and rank, so that a continued run draws the same samples as an undisturbed run.
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = (torch.rand(args.batch_size, 1, generator=generator) * 6 - 3).to(device)
        loss = F.mse_loss(model(x), x.sin())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1

        stopping = any_rank(stop_asked, device)
        if dist.get_rank() == 0 and (stopping or step % args.save_every == 0 or step == args.max_steps):
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            save(args.checkpoint, state)
            print(f"step {step}: loss {loss.item():.5f}", flush=True)

    dist.barrier()
    dist.destroy_process_group()
    if step < args.max_steps:
        sys.exit(EXIT_CONTINUE)


if __name__ == "__main__":
    main()
