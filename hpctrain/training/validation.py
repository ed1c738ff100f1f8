"""Validation that sees every sample once, however many ranks share the work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.runtime.pulse import pulse
from hpctrain.runtime.signals import StopFlag
from hpctrain.training.data.loading import to_device
from hpctrain.training.data.lockstep import in_lockstep
from hpctrain.training.data.sources import ValidationSet
from hpctrain.training.interruption import Interruptible
from hpctrain.training.module import as_scalars
from hpctrain.training.precision import batch_in_precision, forward_context
from hpctrain.training.strategies import Strategy


def validate(
    strategy: Strategy,
    data: ValidationSet,
    team: Team,
    *,
    precision: str,
    method: str = "validation_step",
    lone_name: str = "val_loss",
    num_batches: int | None = None,
    stop: StopFlag | None = None,
) -> dict[str, float] | None:
    """Means of what a method of the module returns over all samples of `data`, equal on every rank.

    None where the ranks agreed to stop before its end. All ranks must call this. The module
    is in evaluation mode meanwhile.

    Args:
        strategy: how ranks compute.
        data: the samples.
        team: the ranks.
        precision: of the forward pass.
        method: the module's, such as `validation_step`.
        lone_name: what a result is called that is a scalar.
        num_batches: of each rank, from the first on; None for all.
        stop: tells whether this rank was told to stop; None where that is to wait for the end.

    Raises:
        UserError: the steps of the ranks do not return the same names, or there was no sample.
    """
    module = strategy.module
    origin = f"{type(module).__name__}.{method}"
    sums: dict[str, torch.Tensor] = {}
    count = 0
    way = Interruptible(team, stop or StopFlag())
    with evaluating(module), torch.no_grad(), closing(data.batches()) as own:
        some = islice(own, num_batches)
        batches = in_lockstep(some, team) if strategy.in_lockstep else some
        for batch_idx, (num_held, batch) in enumerate(way.through(batches)):
            with forward_context(precision, team.device):
                on_device = batch_in_precision(to_device(batch, team.device), precision)
                output, num_samples = strategy.evaluation_step(method, on_device, batch_idx, num_held)
            if num_samples == 0:
                continue
            scalars = as_scalars(output, lone_name, origin)
            if sums and sums.keys() != scalars.keys():
                raise UserError(
                    f"{origin} returned {sorted(scalars)} for a batch, and {sorted(sums)} for those before. "
                    "Return the same names every time."
                )
            for name, mean in scalars.items():
                sums[name] = sums.get(name, 0.0) + mean.to(team.device).double() * num_samples
            count += num_samples
            pulse.enter("validate")
    if way.interrupted:
        return None
    # A rank that had no sample does not know the names.
    names = _agreed_names(team, list(sums) if count else None, origin)
    zero = torch.zeros((), dtype=torch.float64, device=team.device)
    total = torch.stack([zero + count, *(sums.get(name, zero) for name in names)])
    if team.is_distributed:
        dist.all_reduce(total)
    return dict(zip(names, (total[1:] / total[0]).tolist(), strict=True))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Have `module` in evaluation mode meanwhile; each part of it is in its own mode again afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _agreed_names(team: Team, own: list[str] | None, origin: str) -> list[str]:
    told = [(rank, names) for rank, names in enumerate(team.gather(own)) if names is not None]
    if not told:
        raise UserError(f"the data set for {origin} gave no sample to any rank.")
    first, names = told[0]
    for rank, others in told:
        if set(others) != set(names):
            raise UserError(
                f"{origin} returned {sorted(others)} on rank {rank} but {sorted(names)} on rank {first}."
            )
    return list(names)
