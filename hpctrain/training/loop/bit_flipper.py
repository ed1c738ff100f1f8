"""Bit flips in the memory of this rank, to test the detection of silent corruption."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpctrain.records.bit_flip import BitFlip, FlipTarget
from hpctrain.runtime.program.requested_flips import request_flip_of_environment, requested_flips
from hpctrain.training.base.dtensor_parts import local_part

#: Integers of the size of an element.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_IN_STEP = (FlipTarget.GRADIENT, FlipTarget.ACTIVATION)


class BitFlipper:
    """Performs the requested flips: between two steps, or with hooks within a step."""

    def __init__(
        self,
        module: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        rank: int,
        environ: Mapping[str, str],
    ) -> None:
        """Add the flip requested in the environment.

        Args:
            module: the module in training.
            optimizers: its optimizers.
            rank: number of this rank.
            environ: environment variables.
        """
        self._module, self._optimizers = module, optimizers
        self._active: list[_ActiveFlip] = []
        request_flip_of_environment(rank, environ)

    def before_step(self, step: int) -> None:
        """Prepare the flips within `step`."""
        if requested_flips:
            for flip in [each for each in requested_flips if each.step <= step]:
                requested_flips.remove(flip)
                self._active.append(_ActiveFlip(flip))
        for active in self._active:
            if active.flip.target in _IN_STEP and not active.has_hook:
                self._add_hook(active, step)

    def after_step(self, step: int) -> None:
        """Perform the flips after `step`."""
        for active in list(self._active):
            if active.flip.target in _IN_STEP:
                done = active.is_done
            else:
                done = self._flip_state(active, step)
            if done and not active.flip.persistent:
                self._active.remove(active)

    def _flip_state(self, active: _ActiveFlip, step: int) -> bool:
        tensors = dict(
            self._parameters() if active.flip.target is FlipTarget.PARAMETER else self._optimizer_state()
        )
        if not tensors:
            return False
        name = _choose(random.Random(active.flip.seed), tensors)
        with torch.no_grad():
            active.perform(tensors[name], name, step)
        return True

    def _add_hook(self, active: _ActiveFlip, step: int) -> None:
        """Add the hook that performs a flip in a backward or forward pass."""
        chance = random.Random(active.flip.seed)
        handle: Any = None

        def perform(tensor: torch.Tensor, name: str) -> torch.Tensor:
            flipped = tensor.clone()
            active.perform(flipped.detach(), name, step)
            if not active.flip.persistent:
                handle.remove()
            return flipped

        if active.flip.target is FlipTarget.GRADIENT:
            # The module itself may have no forward pass.
            parameters = {
                name: p
                for name, p in self._module.named_parameters()
                if p.requires_grad and ("." in name or not isinstance(p, DTensor))
            }
            name = _choose(chance, parameters)
            parameter: Any = parameters[name]
            owner, _, attribute = name.rpartition(".")
            layer = self._module.get_submodule(owner)

            def flip(gradient: torch.Tensor) -> torch.Tensor:
                return perform(gradient, f"gradient of {name}")

            def wait_for_gathered(*_: Any) -> None:
                nonlocal handle
                handle.remove()
                handle = layer._parameters[attribute].register_hook(flip)  # type: ignore[union-attr]

            # The gradient of a sharded parameter is that of the copy gathered for the forward pass.
            is_gathered = isinstance(parameter, DTensor)
            handle = (
                layer.register_forward_pre_hook(wait_for_gathered)
                if is_gathered
                else parameter.register_hook(flip)
            )
        else:
            layers = {name: each for name, each in self._module.named_modules() if not any(each.children())}
            name = chance.choice(sorted(layers))
            handle = layers[name].register_forward_hook(
                lambda _module, _inputs, output: (
                    perform(output, f"output of {name}")
                    if isinstance(output, torch.Tensor) and torch.is_grad_enabled()
                    else output
                )
            )
        active.has_hook = True

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield name, local_part(parameter).detach()

    def _optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, optimizer in enumerate(self._optimizers):
            for index, state in enumerate(optimizer.state.values()):
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        yield f"{key} of parameter {index} of optimizer {number}", local_part(value).detach()


@dataclass
class _ActiveFlip:
    """A flip that is due."""

    flip: BitFlip
    has_hook: bool = False
    is_done: bool = False

    def perform(self, tensor: torch.Tensor, name: str, step: int) -> None:
        """Flip the bit in `tensor`, which the seed determines, and print it."""
        chance = random.Random(f"{self.flip.seed}/bit")
        if tensor.numel() == 0:
            return
        index = tuple(chance.randrange(size) for size in tensor.shape)
        bit = chance.randrange(8 * tensor.element_size())
        # A mask with only the sign bit is a negative number.
        mask = (1 << bit) - (1 << 8 * tensor.element_size() if bit == 8 * tensor.element_size() - 1 else 0)
        kind = _INTEGERS[tensor.element_size()]
        tensor[index] = (tensor[index].reshape(1).view(kind) ^ mask).view(tensor.dtype)[0]
        if not self.is_done:
            place = f"bit {bit} of element {list(index)} of {name}"
            repeated = ", and in all later steps" if self.flip.persistent else ""
            print(f"hpctrain: chaos: flipped {place} in step {step}{repeated}", file=sys.stderr, flush=True)
        self.is_done = True


def _choose(chance: random.Random, tensors: Mapping[str, torch.Tensor]) -> str:
    """Choose a tensor; larger tensors are more probable."""
    return chance.choices(list(tensors), [max(each.numel(), 1) for each in tensors.values()])[0]
