"""A state with everything that a checkpoint can hold, and functions on it."""

from collections import Counter
from pathlib import Path

import torch

from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir
from hpctrain.checkpoint.store import CheckpointStore, CommittedSave

STATE = {
    "module": {
        "weight": torch.arange(6.0).reshape(2, 3),
        "count": torch.tensor(3),
        "none": torch.zeros(0, 4),
    },
    "half": torch.arange(5).bfloat16(),
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "optimizer": {"state": {0: {"step": torch.tensor(2.0), "betas": (0.9, 0.999)}}, "lr": 0.1 + 0.2},
    "milestones": Counter({3: 1}),
    "none": None,
    "list": [1, "two", True],
}


def save(store: CheckpointStore, step: int, score: float | None = None) -> CommittedSave:
    return store.save(step, STATE, {"torch": torch.get_rng_state()}, score=score)


def steps(folder: Path) -> list[int]:
    return CheckpointDir(folder).steps()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def equal(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b
