"""Functions for the tests of the executor, in their own module, which ranks import by name."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_classifier import Small, dataset

import hpctrain

RUN_DIR = "HPCTRAIN_RUN_DIR"


def introduce(base: int) -> tuple[int, int, float]:
    total = torch.tensor([float(base + dist.get_rank())])
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()} says hello")
    return dist.get_rank(), dist.get_world_size(), total.item()


def train(step_s: float) -> dict[str, Any]:
    """Train like `train_classifier.py`; return metrics and weights."""
    trainer = hpctrain.Trainer(max_epochs=4, global_batch_size=16, checkpoint_every=6, seed=1)
    module, data = Small(step_s), dataset()
    trainer.fit(module, data, data)
    return {
        "metrics": trainer.metrics,
        "weights": {name: value.tolist() for name, value in module.state_dict().items()},
    }


def own_file(name: str) -> Path:
    return Path(os.environ[RUN_DIR], f"{name}-{dist.get_rank()}")


def count_with_own_file(last: int) -> tuple[int, int]:
    """Count steps with the other ranks; save when all agree to stop. Return the first and the last step."""
    path = own_file("count")
    first = int(path.read_text()) if path.exists() else 0
    for step in range(first + 1, last + 1):
        dist.all_reduce(torch.ones(1))
        time.sleep(0.1)
        own_file("step").write_text(str(step))
        if hpctrain.should_stop():
            path.write_text(str(step))
            sys.exit(75)
    return first, last


class Count:
    """The same with submitit's protocol: `checkpoint` returns the call of the next attempt."""

    def __init__(self) -> None:
        self.step = 0
        self.starts: list[int] = []

    def __call__(self, last: int) -> tuple[int, list[int]]:
        self.starts.append(self.step)
        while self.step < last:
            time.sleep(0.1)
            self.step += 1
            own_file("step").write_text(str(self.step))
            if hpctrain.should_stop():
                sys.exit(75)
        return self.step, self.starts

    def checkpoint(self, last: int) -> Any:
        import submitit

        # Fails if not all ranks stopped after the same step.
        steps = torch.tensor([self.step, -self.step])
        dist.all_reduce(steps, op=dist.ReduceOp.MAX)
        assert steps.tolist() == [self.step, -self.step]
        return submitit.helpers.DelayedSubmission(self, last)
