"""A rank's part of the means over the global batch, as it comes together in a step."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hpctrain.errors import UserError

#: What a training step calls the number of tokens, or whatever else, that its loss is the mean over.
TOKENS = "num_tokens"


class ScalarSums:
    """This rank's part of the means over the global batch, added up over its micro-batches."""

    def __init__(self) -> None:
        # Numbers where the host computes them anyway: reading them is cheaper than adding up tensors.
        self.values: dict[str, torch.Tensor | float] = {}

    def add(self, scalars: Mapping[str, torch.Tensor], share: float) -> None:
        """Add means over samples that are `share` of the global batch.

        Where `num_tokens` is among them, `loss` is the mean over so many, whatever the samples.

        Raises:
            UserError: the names are not those of the micro-batch before.
        """
        if self.values and self.values.keys() != scalars.keys():
            raise UserError(
                f"training_step returned {sorted(scalars)} for a micro-batch, and {sorted(self.values)} for "
                "the one before. Return the same names every time."
            )
        tokens = _double(scalars[TOKENS]) if TOKENS in scalars else None
        parts: dict[str, torch.Tensor | float] = {}
        for name, scalar in scalars.items():
            weight = share if tokens is None or name not in ("loss", TOKENS) else 1.0
            # A rank without samples computed with one that is not its own; 0 · inf would be nan.
            part = _double(scalar) * weight if share else 0.0 * _double(torch.zeros_like(scalar))
            parts[name] = part * tokens if tokens is not None and name == "loss" else part
        self.values = (
            {name: self.values[name] + part for name, part in parts.items()} if self.values else parts
        )

    def put(self, scalars: Mapping[str, torch.Tensor], share: float) -> None:
        """Put means beside those that are there; of two that have one name, the later stays."""
        beside = ScalarSums()
        beside.add(scalars, share)
        self.values |= beside.values

    def join(self, other: ScalarSums) -> None:
        """Add what another optimizer's pass over the batch gave: losses add up, others are put beside."""
        losses = [each.values["loss"] for each in (self, other) if "loss" in each.values]
        self.values |= other.values
        if losses:
            self.values["loss"] = sum(losses[1:], losses[0])


def _double(scalar: torch.Tensor) -> torch.Tensor | float:
    """As float64: a number on the CPU, which has computed it by now; a tensor on a GPU, which has not."""
    return scalar.item() if scalar.is_cpu else scalar.detach().double()
