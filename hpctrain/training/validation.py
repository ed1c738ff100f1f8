"""Validation that sees every sample once, however many ranks share the work."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training.data.loading import Loading, to_device, validation_batches
from hpctrain.training.module import Module, as_scalars
from hpctrain.training.precision import forward_context


def validate(
    module: Module, dataset: Any, team: Team, loading: Loading, *, global_batch_size: int, precision: str
) -> dict[str, float]:
    """Means of what `module.validation_step` returns over all samples of `dataset`, equal on every rank.

    All ranks must call this. The module is in evaluation mode meanwhile, and in training mode afterwards.

    Raises:
        UserError: the steps of the ranks do not return the same names.
    """
    ranks = team.ranks
    origin = f"{type(module).__name__}.validation_step"
    sums: dict[str, torch.Tensor] = {}
    count = 0
    module.eval()
    with torch.no_grad():
        batches = validation_batches(
            dataset,
            max(1, global_batch_size // ranks.world_size),
            loading,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        for batch_idx, (num_samples, batch) in enumerate(batches):
            with forward_context(precision, team.device):
                output = module.validation_step(to_device(batch, team.device), batch_idx)
            for name, mean in as_scalars(output, "val_loss", origin).items():
                sums[name] = sums.get(name, 0.0) + mean.to(team.device).double() * num_samples
            count += num_samples
    module.train()
    # Rank 0 always has a sample, while others may have none and do not know the names.
    names: list[str] = team.from_main(list(sums))
    if count and set(names) != set(sums):
        raise UserError(
            f"{origin} returned {sorted(sums)} on rank {ranks.rank} but {sorted(names)} on rank 0."
        )
    zero = torch.zeros((), dtype=torch.float64, device=team.device)
    total = torch.stack([zero + count, *(sums.get(name, zero) for name in names)])
    if team.is_distributed:
        dist.all_reduce(total)
    return dict(zip(names, (total[1:] / total[0]).tolist(), strict=True))
