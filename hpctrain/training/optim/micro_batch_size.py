"""Search for the largest micro-batch that fits into memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.text import pluralize
from hpctrain.training.base import rng


def largest_that_fits(share: int, can_train: Callable[[int], bool]) -> int:
    """Return the largest size that fits, among those of `share` divided into 1, 2, 3 … equal parts."""

    def size(num_parts: int) -> int:
        return -(-share // num_parts)

    too_few, num_parts = 0, 1
    while not can_train(size(num_parts)):
        if size(num_parts) == 1:
            raise UserError(
                "micro_batch_size is 'auto', but even a training step with one sample does not fit into "
                "memory. Use a smaller model or smaller inputs."
            )
        too_few, num_parts = num_parts, min(2 * num_parts, share)
    while num_parts - too_few > 1:
        middle = (too_few + num_parts) // 2
        if can_train(size(middle)):
            num_parts = middle
        else:
            too_few = middle
    return size(num_parts)


def find_micro_batch_size(
    module: nn.Module, context: DistributedContext, share: int, train: Callable[[int], object]
) -> int:
    """Collective. Return the largest size that fits on every rank; trials must not wait for other ranks."""
    if context.device.type != "cuda":
        return share
    if context.is_distributed and any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
        raise UserError(
            "micro_batch_size is 'auto', but ranks wait for each other in the SyncBatchNorm layers of "
            "the module. The search for a micro-batch size could deadlock if a rank runs out of memory. "
            "Set micro_batch_size to a number."
        )
    return largest_that_fits(share, lambda count: fits_on_all_ranks(module, context, count, train))


def fits_on_all_ranks(
    module: nn.Module, context: DistributedContext, count: int, train: Callable[[int], object]
) -> bool:
    """Collective. Return true if passes with `count` samples fit into the memory of every rank."""
    with preserve_state(module):
        fits = fits_in_memory(module, context.device, lambda: train(count))
    return context.all_reduce_min(float(fits)) > 0


def fits_in_memory(module: nn.Module, device: torch.device, forward_backward: Callable[[], object]) -> bool:
    """Return true if two micro-batches in a row fit, next to two numbers per parameter for the optimizer."""
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


def snapshot_buffers(module: nn.Module) -> Callable[[], None]:
    generators = rng.capture_rng_state()
    buffers = [(buffer, buffer.detach().to("cpu", copy=True)) for buffer in module.buffers()]

    def put_back() -> None:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        rng.restore_rng_state(generators)

    return put_back


@contextlib.contextmanager
def preserve_state(module: nn.Module) -> Iterator[None]:
    put_back = snapshot_buffers(module)
    try:
        yield
    finally:
        put_back()


def add_oom_hint(error: torch.OutOfMemoryError, setting: Any, num_samples: int) -> None:
    if num_samples == 1:
        remedy = "Use a smaller model or smaller inputs."
    elif setting == "auto":
        remedy = "Set a smaller micro_batch_size."
    else:
        remedy = "Set a smaller micro_batch_size, or 'auto' for the largest size that fits."
    error.add_note(
        f"hpctrain: This rank processed {pluralize(num_samples, 'sample')} at once "
        f"(micro_batch_size={setting!r}). {remedy}"
    )
