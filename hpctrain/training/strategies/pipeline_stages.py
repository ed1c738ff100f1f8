"""Division of a module into stages: the layers that each rank computes and the parameters it updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.training.base import rng
from hpctrain.training.module import Module


class _StageBoundary(Exception):
    """Exit from a training step at the point where the next rank continues."""

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output


class PipelineStages:
    """Stages of a module's largest `nn.Sequential`, one per rank, of about equal size.

    The part of the training step before the Sequential runs on the first stage. The part after the Sequential
    runs on the last stage, which calls the step again and substitutes the stages' output.

    Attributes:
        owned: for each rank, the parameters only in its stage.
        shared: all other parameters; any rank may have a part of the gradients.
    """

    def __init__(self, module: Module, rank: int, num_stages: int) -> None:
        self._module, self._rank, self._last = module, rank, num_stages - 1
        self._prepared = _largest(module, num_stages)
        blocks = list(self._prepared)
        ends = _stage_ends([sum(p.numel() for p in block.parameters()) for block in blocks], num_stages)
        stages = [blocks[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
        self._layers = nn.Sequential(*stages[rank])
        everywhere = Counter(p for _, p in module.named_parameters(remove_duplicate=False))
        self.owned: list[list[nn.Parameter]] = []
        self.buffers: list[list[torch.Tensor]] = []
        for stage in stages:
            layers = nn.Sequential(*stage)
            inside = Counter(p for _, p in layers.named_parameters(remove_duplicate=False))
            self.owned.append([p for p in inside if inside[p] == everywhere[p]])
            self.buffers.append(list(layers.buffers()))
        taken = {p for owned in self.owned for p in owned}
        self.shared = [p for p in module.parameters() if p not in taken]

    def forward(self, held: torch.Tensor, batch: Any, where: tuple[int, ...], seed: int = 0) -> torch.Tensor:
        """Return the output of this rank's stage for `held`; the first stage starts from the batch.

        The training step draws the same random numbers from `seed` as in `finish_step`.
        """
        if self._rank > 0:
            output: torch.Tensor = self._layers(held)
            return output

        def cut(*inputs: Any) -> torch.Tensor:
            raise _StageBoundary(self._layers(*inputs))

        try:
            with rng.seeded_rng(seed), self._replace_sequential(cut):
                self._module.training_step(batch, *where)
        except _StageBoundary as end:
            return end.output
        raise UserError(
            f"{type(self._module).__name__}.training_step did not call the Sequential that strategy "
            "'pipeline' splits into stages. Call this Sequential in training_step, or use another "
            "strategy."
        )

    def finish_step(self, output: torch.Tensor, batch: Any, where: tuple[int, ...], seed: int = 0) -> Any:
        calls = 0

        def give(*_: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UserError(
                    f"{type(self._module).__name__}.training_step calls the Sequential more than once. "
                    "Strategy 'pipeline' splits this Sequential into stages and can run it only once per "
                    "micro-batch. Concatenate the inputs (torch.cat) and call it once, or use strategy "
                    "'zero3'."
                )
            return output

        with rng.seeded_rng(seed), self._replace_sequential(give):
            return self._module.training_step_end(self._module.training_step(batch, *where))

    def check_gradients(self) -> None:
        """Check that this rank has no gradient for parameters of another stage only."""
        others = {p for rank, owned in enumerate(self.owned) if rank != self._rank for p in owned}
        for name, parameter in self._module.named_parameters():
            if parameter in others and parameter.grad is not None:
                raise UserError(
                    f"{type(self._module).__name__}.training_step uses {name} outside the Sequential that "
                    "strategy 'pipeline' splits into stages (for example, in a penalty on all weights). "
                    "Only the rank of the parameter's stage can update it. Use the optimizer's "
                    "weight_decay instead, or strategy 'zero3'."
                )

    @contextmanager
    def _replace_sequential(self, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
        self._prepared.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._prepared.forward


def _largest(module: nn.Module, num_stages: int) -> nn.Sequential:
    rows = [part for part in module.modules() if isinstance(part, nn.Sequential) and len(part) >= num_stages]
    if not rows:
        raise UserError(
            f"Strategy 'pipeline' splits a torch.nn.Sequential into {num_stages} stages, one per rank, "
            f"but no Sequential in {type(module).__name__} has that many blocks. Put the blocks into one "
            "Sequential, or start fewer ranks."
        )
    return max(rows, key=lambda row: sum(parameter.numel() for parameter in row.parameters()))


def _stage_ends(sizes: list[int], num_stages: int) -> list[int]:
    ends: list[int] = []
    total, sum_so_far = sum(sizes), 0
    for number, size in enumerate(sizes, 1):
        sum_so_far += size
        left_over, missing = len(sizes) - number, num_stages - 1 - len(ends)
        if missing and (sum_so_far >= total * (len(ends) + 1) / num_stages or left_over == missing):
            ends.append(number)
    return [*ends, len(sizes)]
