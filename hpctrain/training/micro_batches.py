"""How many samples a rank computes with at once: as many as memory holds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training import rng


def largest_that_fits(share: int, fits: Callable[[int], bool]) -> int:
    """The largest size of a micro-batch with which a share of so many samples can be trained.

    Only sizes are tried that make a difference, `share` in 1, 2, 3 … equal parts; that more parts fit where
    fewer do is taken for granted.

    Raises:
        UserError: not even one sample fits.
    """
    too_few, parts = 0, 1
    while not fits(_part(share, parts)):
        if _part(share, parts) == 1:
            raise UserError(
                "micro_batch_size is 'auto', but a training step does not fit into memory even with one "
                "sample. Make the model or its input smaller."
            )
        too_few, parts = parts, min(2 * parts, share)
    while parts - too_few > 1:
        middle = (too_few + parts) // 2
        if fits(_part(share, middle)):
            parts = middle
        else:
            too_few = middle
    return _part(share, parts)


def find_micro_batch_size(
    module: nn.Module,
    team: Team,
    share: int,
    forward_backward: Callable[[int], object],
) -> int:
    """The largest size that fits on every rank, found by trying. All ranks must call this.

    Where there is no GPU, memory is not what limits a batch, and all of the share is computed with at once.

    Args:
        module: what is trained; it, and this process's random generators, are left as they were.
        team: the ranks.
        share: samples of the rank that has most.
        forward_backward: computes a loss and its gradients for so many samples. No rank may wait for another
            in it: one may run out of memory while others do not.

    Raises:
        UserError: not even one sample fits; or the module has layers that wait for all ranks.
    """
    if team.device.type != "cuda":
        return share
    if team.is_distributed and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise UserError(
            "micro_batch_size is 'auto', but the module has SyncBatchNorm layers, in which ranks wait for "
            "each other, and one of them may run out of memory while it is tried. Give a number."
        )

    def fits(count: int) -> bool:
        with left_as_it_was(module):
            alone = fits_here(module, team.device, lambda: forward_backward(count))
        return team.lowest(float(alone)) > 0

    return largest_that_fits(share, fits)


def fits_here(module: nn.Module, device: torch.device, forward_backward: Callable[[], object]) -> bool:
    """Whether two micro-batches in a row fit, the second beside the gradients of the first.

    Meanwhile room is held for what an optimizer like Adam keeps: two numbers a parameter.
    """
    try:
        held = [
            torch.empty((2, *parameter.shape), dtype=parameter.dtype, device=device)
            for parameter in module.parameters()
            if parameter.requires_grad
        ]
        for _ in range(2):
            forward_backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        del held
    except torch.OutOfMemoryError:
        return False
    finally:
        module.zero_grad(set_to_none=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return True


def remembered(module: nn.Module) -> Callable[[], None]:
    """What puts back the buffers of `module`, such as running means, and the random generators."""
    generators = rng.capture()
    buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in module.buffers()]

    def put_back() -> None:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        rng.restore(generators)

    return put_back


@contextlib.contextmanager
def left_as_it_was(module: nn.Module) -> Iterator[None]:
    """Put back the buffers of `module`, such as running means, and the random generators, after the block."""
    put_back = remembered(module)
    try:
        yield
    finally:
        put_back()


def out_of_memory_advice(error: torch.OutOfMemoryError, setting: Any, num_samples: int) -> None:
    """Add to `error` what the user can do."""
    error.add_note(
        f"hpctrain: this rank computed with {num_samples} samples at once (micro_batch_size={setting!r}). "
        "A smaller micro_batch_size takes less memory and gives the same gradient; "
        "micro_batch_size='auto' finds the largest that fits."
    )


def _part(share: int, parts: int) -> int:
    return -(-share // parts)
