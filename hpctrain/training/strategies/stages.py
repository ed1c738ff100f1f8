"""A module as a row of stages: which of its layers each rank computes, and who updates which parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hpctrain.errors import UserError
from hpctrain.training import rng
from hpctrain.training.module import Module


class _Cut(Exception):
    """Leaves a training step at the point where another rank goes on."""

    def __init__(self, output: torch.Tensor) -> None:
        self.output = output


class Stages:
    """The largest `nn.Sequential` of a module, in as many stages as there are ranks, about equally large.

    What the training step does before it belongs to the first stage, and what it does afterwards to the
    last one: there it is called again, and gets what came out of the stages.

    Attributes:
        owned: for each rank the parameters that only its stage has.
        shared: all other parameters, which any rank may have a part of the gradient of.
    """

    def __init__(self, module: Module, rank: int, num_stages: int) -> None:
        """Cut the module.

        Raises:
            UserError: it has nothing to cut into so many stages.
        """
        self._module, self._rank, self._last = module, rank, num_stages - 1
        self._whole = _largest(module, num_stages)
        blocks = list(self._whole)
        ends = _ends([sum(p.numel() for p in block.parameters()) for block in blocks], num_stages)
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
        """What this rank's stage makes of what it is handed; the first one begins with the batch.

        The training step draws the random numbers that follow from `seed`, as it does in `end`.
        """
        if self._rank > 0:
            output: torch.Tensor = self._layers(held)
            return output

        def cut(*inputs: Any) -> torch.Tensor:
            raise _Cut(self._layers(*inputs))

        try:
            with rng.seeded(seed), self._in_place_of_the_whole(cut):
                self._module.training_step(batch, *where)
        except _Cut as end:
            return end.output
        raise UserError(
            f"{type(self._module).__name__}.training_step did not call the Sequential that strategy "
            "'pipeline' has cut into stages."
        )

    def end(self, output: torch.Tensor, batch: Any, where: tuple[int, ...], seed: int = 0) -> Any:
        """What the training step returns, given what comes out of the last stage.

        Raises:
            UserError: it calls the Sequential more than once.
        """
        calls = 0

        def give(*_: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            if calls > 1:
                raise UserError(
                    f"{type(self._module).__name__}.training_step calls the Sequential that strategy "
                    "'pipeline' has cut into stages more than once, and a micro-batch goes through them "
                    "once. Call it once with all its inputs joined (torch.cat), or take 'zero3'."
                )
            return output

        with rng.seeded(seed), self._in_place_of_the_whole(give):
            return self._module.training_step_end(self._module.training_step(batch, *where))

    def check_gradients(self) -> None:
        """See that this rank has no gradient of what another stage has alone.

        Raises:
            UserError: it has.
        """
        others = {p for rank, owned in enumerate(self.owned) if rank != self._rank for p in owned}
        for name, parameter in self._module.named_parameters():
            if parameter in others and parameter.grad is not None:
                raise UserError(
                    f"{type(self._module).__name__}.training_step uses {name} outside of the Sequential that "
                    "strategy 'pipeline' has cut into stages, as a penalty on all weights does. Only the "
                    "rank of its stage knows it: take an optimizer's weight_decay, or strategy 'zero3'."
                )

    @contextmanager
    def _in_place_of_the_whole(self, forward: Callable[..., torch.Tensor]) -> Iterator[None]:
        self._whole.forward = forward  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self._whole.forward


def _largest(module: nn.Module, num_stages: int) -> nn.Sequential:
    rows = [part for part in module.modules() if isinstance(part, nn.Sequential) and len(part) >= num_stages]
    if not rows:
        raise UserError(
            f"strategy 'pipeline' cuts a torch.nn.Sequential into {num_stages} stages, one a rank, and "
            f"{type(module).__name__} has none with so many blocks. Put the blocks into one, or start fewer "
            "ranks."
        )
    return max(rows, key=lambda row: sum(parameter.numel() for parameter in row.parameters()))


def _ends(sizes: list[int], num_stages: int) -> list[int]:
    """Where each stage ends: none is empty, and the sizes are about equal."""
    ends: list[int] = []
    total, sum_so_far = sum(sizes), 0
    for number, size in enumerate(sizes, 1):
        sum_so_far += size
        left_over, missing = len(sizes) - number, num_stages - 1 - len(ends)
        if missing and (sum_so_far >= total * (len(ends) + 1) / num_stages or left_over == missing):
            ends.append(number)
    return [*ends, len(sizes)]
