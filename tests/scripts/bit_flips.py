"""Flips of bits in the memory of a rank, as by a faulty GPU, to test the detection of wrong results."""

import os
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import hpctrain
from hpctrain.training.base.tensors import local_part

#: Integers of the size of an element.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class BitFlip(hpctrain.Callback):
    """Flip a bit once, in the first attempt; the seed determines tensor, element and bit.

    The target is a parameter or a value of the optimizer state after a step, the rank's own gradient before
    the ranks exchange gradients, or the output of a submodule.
    """

    rank: int
    step: int
    seed: int = 0
    target: Literal["parameter", "optimizer", "gradient", "activation"] = "parameter"
    persistent: bool = False
    """Flip the bit again in each later step, and in all attempts."""
    is_done: bool = False

    def on_fit_start(self, trainer: Any, module: torch.nn.Module) -> None:
        own_rank = dist.get_rank() if dist.is_initialized() else 0
        if own_rank != self.rank or (os.environ.get("HPCTRAIN_ATTEMPT", "0") != "0" and not self.persistent):
            return
        self.module, self.optimizers, self.completed = module, trainer.optimizers, trainer.step
        self.has_hook = False
        self._before_step()
        self.optimizers[-1].register_step_post_hook(lambda *_: self._after_step())

    def _before_step(self) -> None:
        is_due = self.completed + 1 >= self.step
        if is_due and self.target in ("gradient", "activation") and not self.has_hook:
            self.has_hook = True
            self._add_hook()

    def _after_step(self) -> None:
        self.completed += 1
        is_due = self.completed >= self.step and (self.persistent or not self.is_done)
        if is_due and self.target in ("parameter", "optimizer"):
            tensors = dict(self._parameters() if self.target == "parameter" else self._optimizer_state())
            name = _choose(random.Random(self.seed), tensors)
            with torch.no_grad():
                self._flip(tensors[name], name)
        self._before_step()

    def _add_hook(self) -> None:
        chance = random.Random(self.seed)
        handle: Any = None

        def flipped(tensor: torch.Tensor, name: str) -> torch.Tensor:
            copy = tensor.clone()
            self._flip(copy.detach(), name)
            if not self.persistent:
                handle.remove()
            return copy

        if self.target == "activation":
            layers = {name: each for name, each in self.module.named_modules() if not any(each.children())}
            name = chance.choice(sorted(layers))
            handle = layers[name].register_forward_hook(
                lambda _module, _inputs, output: (
                    flipped(output, f"output of {name}")
                    if isinstance(output, torch.Tensor) and torch.is_grad_enabled()
                    else output
                )
            )
            return
        parameters = {name: each for name, each in self.module.named_parameters() if each.requires_grad}
        name = _choose(chance, parameters)
        owner, _, attribute = name.rpartition(".")
        layer = self.module.get_submodule(owner)

        def flip(gradient: torch.Tensor) -> torch.Tensor:
            return flipped(gradient, f"gradient of {name}")

        def wait_for_gathered(*_: Any) -> None:
            nonlocal handle
            handle.remove()
            handle = layer._parameters[attribute].register_hook(flip)

        # The gradient of a sharded parameter is that of the copy gathered for the forward pass.
        if isinstance(parameters[name], DTensor):
            handle = layer.register_forward_pre_hook(wait_for_gathered)
        else:
            handle = parameters[name].register_hook(flip)

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            yield name, local_part(parameter).detach()

    def _optimizer_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, optimizer in enumerate(self.optimizers):
            for index, state in enumerate(optimizer.state.values()):
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.is_floating_point():
                        yield f"{key} of parameter {index} of optimizer {number}", local_part(value).detach()

    def _flip(self, tensor: torch.Tensor, name: str) -> None:
        """Flip the bit in `tensor`, which the seed determines, and print it."""
        chance = random.Random(f"{self.seed}/bit")
        if tensor.numel() == 0:
            return
        index = tuple(chance.randrange(size) for size in tensor.shape)
        bits = 8 * tensor.element_size()
        bit = chance.randrange(bits)
        # A mask with only the sign bit is a negative number.
        mask = (1 << bit) - (1 << bits if bit == bits - 1 else 0)
        kind = INTEGERS[tensor.element_size()]
        tensor[index] = (tensor[index].reshape(1).view(kind) ^ mask).view(tensor.dtype)[0]
        if not self.is_done:
            place = f"bit {bit} of element {list(index)} of {name}"
            print(f"flipped {place} in step {self.step} or later", file=sys.stderr, flush=True)
        self.is_done = True


def _choose(chance: random.Random, tensors: Mapping[str, torch.Tensor]) -> str:
    """Choose a tensor; larger tensors are more probable."""
    return chance.choices(list(tensors), [max(each.numel(), 1) for each in tensors.values()])[0]
