"""Weights of a replica as a few long vectors, which transfer faster than many short ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn


class FlatParameters:
    """Trainable parameters of a module."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters: list[torch.Tensor] = [p for p in module.parameters() if p.requires_grad]

    def flat(self) -> torch.Tensor:
        """Return a copy of all parameters as one float32 vector."""
        return torch.cat([p.detach().reshape(-1).float() for p in self.parameters])

    def load(self, flat: torch.Tensor) -> None:
        """Set the parameters from such a vector."""
        self.put(flat, self.parameters)

    @staticmethod
    def put(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Copy consecutive pieces of a vector into `tensors`."""
        with torch.no_grad():
            for tensor, values in zip(
                tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
            ):
                tensor.copy_(values.view_as(tensor))

    @staticmethod
    def kept_by(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
        """Return the optimizers' state tensors, such as momenta, but not counters, which never differ."""
        return [
            value
            for optimizer in optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            for value in optimizer.state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim
        ]

    @staticmethod
    def by_type(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """Yield groups of tensors with equal dtype and device, which can be concatenated."""
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        yield from kinds.values()
