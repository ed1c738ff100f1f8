"""Train a small model in an own loop: any launcher starts the ranks, and the script saves and resumes itself.

`--fault N:KIND` disturbs rank `WORLD_SIZE - 1` at step N of the first attempt: `kill`, `hang` or `raise`.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist


def set_rank_variables() -> None:
    """Derive the variables of `env://` from those of srun, as many scripts do."""
    if "RANK" not in os.environ and "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:
        os.environ["RANK"] = os.environ["SLURM_PROCID"]
        os.environ["WORLD_SIZE"] = os.environ["SLURM_STEP_NUM_TASKS"]
        os.environ["LOCAL_RANK"] = os.environ["SLURM_LOCALID"]


def disturb(step: int, fault: str, rank: int, world_size: int, mark: Path) -> None:
    at, _, kind = fault.partition(":")
    if not kind or step != int(at) or rank != world_size - 1 or mark.exists():
        return
    mark.touch()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "raise":
        raise RuntimeError("the data are broken")
    time.sleep(3600)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--fault", default=os.environ.get("FAULT", ""))
    args = parser.parse_args()
    set_rank_variables()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    args.out.mkdir(parents=True, exist_ok=True)
    checkpoint, begin = args.out / "checkpoint.pt", 0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"]
    print(f"rank {rank} of {world_size} starts after step {begin}", flush=True)
    for step in range(begin + 1, args.steps + 1):
        disturb(step, args.fault, rank, world_size, args.out / "disturbed")
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(8, 4, generator=generator)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if world_size > 1:
                dist.all_reduce(parameter.grad)
                parameter.grad /= world_size
        optimizer.step()
        if rank == 0 and (step % 5 == 0 or step == args.steps):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").replace(checkpoint)
        time.sleep(args.pause)
    if rank == 0:
        weights = [round(weight, 6) for weight in model.weight.flatten().tolist()]
        (args.out / "result").write_text(f"{weights}\n")
        print(f"trained {args.steps} steps: {weights}", flush=True)


if __name__ == "__main__":
    main()
