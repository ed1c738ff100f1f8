"""Random state: seeded, captured into tensors for a checkpoint, and put back."""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping

import torch


def derived_seed(*parts: object) -> int:
    """A seed in [0, 2^63) that is independent for different `parts`, such as (seed, purpose, rank)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    """Seed torch (on all devices), Python's `random` and, where it is in use, NumPy's legacy generator."""
    torch.manual_seed(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


def capture() -> dict[str, torch.Tensor]:
    """This process's random state, as uint8 tensors."""
    state = {"torch": torch.get_rng_state(), "python": _as_tensor(random.getstate())}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = _as_tensor([str(kind), keys.tolist(), *rest])
    return state


def restore(state: Mapping[str, torch.Tensor]) -> None:
    """Put back what `capture` returned, as far as this process has those generators."""
    torch.set_rng_state(state["torch"])
    version, keys, gauss = json.loads(bytes(state["python"].tolist()))
    random.setstate((version, tuple(keys), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(tuple(json.loads(bytes(state["numpy"].tolist()))))


def _as_tensor(value: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
