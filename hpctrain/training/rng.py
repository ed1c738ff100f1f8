"""Random state: seeded, captured into tensors for a checkpoint, and put back."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

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


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let the generators draw what follows from `seed`, and put them back after the block."""
    before = capture()
    seed_all(seed)
    try:
        yield
    finally:
        restore(before)


def capture() -> dict[str, torch.Tensor]:
    """This process's random state, as tensors whose shapes are always the same."""
    version, words, gauss = random.getstate()
    state = {"torch": torch.get_rng_state(), **_as_tensors("python", [version, *words], gauss)}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        _, words, position, has_gauss, gauss = numpy.random.get_state()
        state |= _as_tensors("numpy", [*words.tolist(), position], gauss if has_gauss else None)
    return state


def restore(state: Mapping[str, torch.Tensor]) -> None:
    """Put back what `capture` returned, as far as this process has those generators."""
    torch.set_rng_state(state["torch"])
    (version, *words), gauss = _from_tensors(state, "python")
    random.setstate((version, tuple(words), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        (*words, position), gauss = _from_tensors(state, "numpy")
        numpy.random.set_state(("MT19937", words, position, int(gauss is not None), gauss or 0.0))


def _as_tensors(name: str, words: list[int], gauss: float | None) -> dict[str, torch.Tensor]:
    """A Mersenne Twister, and the normal number that it has drawn already for the next call, if any."""
    kept = [0.0, 0.0] if gauss is None else [1.0, gauss]
    return {
        name: torch.tensor(words, dtype=torch.int64),
        f"{name}-gauss": torch.tensor(kept, dtype=torch.float64),
    }


def _from_tensors(state: Mapping[str, torch.Tensor], name: str) -> tuple[list[int], float | None]:
    has_gauss, gauss = state[f"{name}-gauss"].tolist()
    return state[name].tolist(), gauss if has_gauss else None
