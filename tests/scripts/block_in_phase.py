"""Block rank 1 in native code in a phase of the first attempt: `block_in_phase.py PHASE`.

Like a compiler or a file system, it does not return to Python, so no handler runs. A save is only slow.
"""

import ctypes
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hpctrain
from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir

PHASE = sys.argv[1]


def enter(phase: str) -> None:
    is_here = (os.environ["RANK"], os.environ["HPCTRAIN_ATTEMPT"]) == ("1", "0")
    if phase != PHASE or (not is_here and phase != "save"):
        return
    mark = Path(os.environ["HPCTRAIN_RUN_DIR"], "entered")
    if mark.exists():
        return
    mark.touch()
    if phase == "save":
        time.sleep(3)
    else:
        mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
        for _ in range(2):
            library.pthread_mutex_lock(mutex)


class Data(torch.utils.data.Dataset):
    num_read = 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_read += 1
        if self.num_read == 24:
            enter("data")
        return torch.full((2,), float(index))


class Model(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.num_steps = torch.nn.Linear(2, 1), 0

    def training_step(self, batch, batch_idx):
        self.num_steps += 1
        enter({1: "compile", 2: "warm-up"}.get(self.num_steps, "step"))
        return self.layer(batch).square().mean()

    def validation_step(self, batch, batch_idx):
        if self.num_steps:
            enter("evaluation")
        return {"val_loss": self.layer(batch).square().mean()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-4)


def commit_slowly(*args, commit=CheckpointDir.commit, **kwargs):
    enter("save")
    return commit(*args, **kwargs)


def train_without_trainer() -> None:
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for step in range(10):
        if step == 5:
            enter("own loop")
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    enter("start")
    if PHASE == "own loop":
        train_without_trainer()
    else:
        CheckpointDir.commit = commit_slowly
        settings = {"global_batch_size": 8, "validate_every": 4, "checkpoint_every": 2}
        trainer = hpctrain.Trainer(max_steps=12, memory_copies=False, **settings)
        trainer.fit(Model(), Data(), Data())
