"""Validation that uses every sample exactly once, for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.training.base.precision import cast_batch, forward_context
from hpctrain.training.data.dataset_adapters import ValidationSet
from hpctrain.training.data.loader_config import to_device
from hpctrain.training.data.lockstep import pad_to_longest
from hpctrain.training.loop.stoppable_loop import StoppableLoop
from hpctrain.training.module import as_scalars
from hpctrain.training.strategies import Strategy


def run_validation(
    strategy: Strategy,
    data: ValidationSet,
    team: DistributedContext,
    *,
    precision: str,
    method: str = "validation_step",
    lone_name: str = "val_loss",
    num_batches: int | None = None,
    stop: StopFlag | None = None,
) -> dict[str, float] | None:
    """Return the means of a module method over all samples of `data`, equal on every rank.

    Returns None if the ranks agreed to stop before the end. The module is in evaluation mode during the call.
    All ranks must call this.

    Args:
        strategy: the strategy of the module.
        data: the samples.
        team: the ranks.
        precision: precision of the forward pass.
        method: the module's method, such as `validation_step`.
        lone_name: name of the metric if the method returns a scalar.
        num_batches: batches per rank, from the first on; None for all.
        stop: this rank's stop flag; None to ignore stop signals.

    Raises:
        UserError: the steps of the ranks do not return the same names, or there was no sample.
    """
    module = strategy.module
    origin = f"{type(module).__name__}.{method}"
    sums: dict[str, torch.Tensor] = {}
    count = 0
    way = StoppableLoop(team, stop or StopFlag())
    with eval_mode(module), torch.no_grad(), closing(data.batches()) as own:
        some = islice(own, num_batches)
        batches = pad_to_longest(some, team) if strategy.in_lockstep else some
        for batch_idx, (num_held, batch) in enumerate(way.through(batches)):
            with forward_context(precision, team.device):
                on_device = cast_batch(to_device(batch, team.device), precision)
                output, num_samples = strategy.evaluation_step(method, on_device, batch_idx, num_held)
            if num_samples == 0:
                continue
            scalars = as_scalars(output, lone_name, origin)
            if sums and sums.keys() != scalars.keys():
                raise UserError(
                    f"{origin} returned {sorted(scalars)} for a batch, but {sorted(sums)} for earlier ones. "
                    "Return the same names every time."
                )
            for name, mean in scalars.items():
                sums[name] = sums.get(name, 0.0) + mean.to(team.device).double() * num_samples
            count += num_samples
            activity.enter("validate")
    if way.interrupted:
        return None
    # A rank without samples does not have the names.
    names = _agreed_names(team, list(sums) if count else None, origin)
    zero = torch.zeros((), dtype=torch.float64, device=team.device)
    total = torch.stack([zero + count, *(sums.get(name, zero) for name in names)])
    if team.is_distributed:
        dist.all_reduce(total)
    return dict(zip(names, (total[1:] / total[0]).tolist(), strict=True))


@contextmanager
def eval_mode(module: nn.Module) -> Iterator[None]:
    """Put `module` in evaluation mode within the block; afterwards restore the mode of each submodule."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _agreed_names(team: DistributedContext, own: list[str] | None, origin: str) -> list[str]:
    told = [(rank, names) for rank, names in enumerate(team.gather(own)) if names is not None]
    if not told:
        raise UserError(f"the data set for {origin} gave no samples on any rank.")
    first, names = told[0]
    for rank, others in told:
        if set(others) != set(names):
            raise UserError(
                f"{origin} returned {sorted(others)} on rank {rank}, but {sorted(names)} on rank {first}."
            )
    return list(names)
