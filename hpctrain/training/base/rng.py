"""Seed random generators, capture their state into tensors for a checkpoint, and restore it."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn


def derive_seed(*components: object) -> int:
    """Return a seed in [0, 2^63), independent for different components such as (seed, purpose, rank)."""
    digest = hashlib.blake2b("/".join(map(str, components)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_all(seed: int) -> None:
    # `torch.manual_seed` also records a traceback for each type of device that does not exist: 0.5 ms.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)


@contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    before = capture_rng_state()
    seed_all(seed)
    try:
        yield
    finally:
        restore_rng_state(before)


def snapshot_buffers(module: nn.Module) -> Callable[[], None]:
    """Return a function that restores the current buffers and random state."""
    generators = capture_rng_state()
    buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in module.buffers()]

    def put_back() -> None:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        restore_rng_state(generators)

    return put_back


@contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    put_back = snapshot_buffers(module)
    try:
        yield
    finally:
        put_back()


def capture_rng_state() -> dict[str, torch.Tensor]:
    """Return the random state of this process, as tensors of constant shapes."""
    version, numbers, gauss = random.getstate()
    state = {"torch": torch.get_rng_state(), **_as_tensors("python", [version, *numbers], gauss)}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if numpy := sys.modules.get("numpy"):
        _, numbers, position, has_gauss, gauss = numpy.random.get_state()
        state |= _as_tensors("numpy", [*numbers.tolist(), position], gauss if has_gauss else None)
    return state


def restore_rng_state(state: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    (version, *numbers), gauss = _from_tensors(state, "python")
    random.setstate((version, tuple(numbers), gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")):
        (*numbers, position), gauss = _from_tensors(state, "numpy")
        numpy.random.set_state(("MT19937", numbers, position, int(gauss is not None), gauss or 0.0))


def resume_rng_state(state: Mapping[str, torch.Tensor] | None, *new_seed: object) -> None:
    """Restore the state of this rank, or seed it from `new_seed` if the checkpoint has no state for it."""
    if state:
        restore_rng_state(state)
    else:
        seed_all(derive_seed(*new_seed))


def _as_tensors(name: str, numbers: list[int], gauss: float | None) -> dict[str, torch.Tensor]:
    cached_normal = [0.0, 0.0] if gauss is None else [1.0, gauss]
    return {
        name: torch.tensor(numbers, dtype=torch.int64),
        f"{name}-gauss": torch.tensor(cached_normal, dtype=torch.float64),
    }


def _from_tensors(state: Mapping[str, torch.Tensor], name: str) -> tuple[list[int], float | None]:
    has_gauss, gauss = state[f"{name}-gauss"].tolist()
    return state[name].tolist(), gauss if has_gauss else None
