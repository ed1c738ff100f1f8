"""The training of the fault benchmark: model, data, and the record of its steps. All tools use it."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

#: Two epochs. A checkpoint is due every ten steps.
NUM_SAMPLES, GLOBAL_BATCH, NUM_STEPS, SAVE_EVERY, STEP_S = 960, 16, 120, 10, 0.1
SEED = 1

folder = Path(os.environ.get("FAULTS_FOLDER", "."))
checkpoints = folder / "disk" / "checkpoints"


class Samples(Dataset):
    """Random numbers and their sum. A sample contains its index."""

    def __init__(self) -> None:
        self._inputs = torch.randn(NUM_SAMPLES, 16, generator=torch.Generator().manual_seed(SEED))

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._inputs[index], index


class Net(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(SEED)
        super().__init__(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 1))


def loss_of(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean squared error, after the time of a step."""
    time.sleep(STEP_S)
    inputs, _indices = batch
    return (net(inputs).squeeze(1) - inputs.sum(dim=1)).square().mean()


def adam(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def record_step(step: int, samples: list[int], rank: int) -> None:
    """Append a completed step of this rank, with the indices of its samples, to the record."""
    line = {"step": step, "rank": rank, "samples": samples, "time": time.time(), "pid": os.getpid()}
    fd = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(line).encode() + b"\n")
    os.close(fd)


def record_result(net: nn.Module) -> None:
    """Write the parameters after the last step."""
    parameters = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
    digest = hashlib.sha256(parameters.numpy().tobytes()).hexdigest()
    result = {"digest": digest, "parameters": parameters.tolist(), "time": time.time()}
    (folder / "result.new").write_text(json.dumps(result))
    (folder / "result.new").rename(folder / "result.json")
