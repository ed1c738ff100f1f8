"""ZeRO stages 2 and 3: parameters, gradients and optimizer state are sharded over the ranks.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020; Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023. Based on torch's `fully_shard`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from hpctrain.errors import UserError
from hpctrain.torch_compat import FSDP_ATTRIBUTES, fsdp_states
from hpctrain.training.determinism.gradient_sum import SummedParameter
from hpctrain.training.optim.optimizer_setup import OptimizerSetup
from hpctrain.training.strategies.base import Strategy, broadcast_buffers
from hpctrain.training.strategies.sharded_params import (
    ShardedParameters,
    check_module_parameters,
    gradient_norm,
)

if TYPE_CHECKING:
    from hpctrain.training.trainer_config import TrainerConfig


class FullyShardedBase(Strategy):
    """Strategy in which each rank stores rows of every parameter, with their gradients and optimizer state."""

    in_lockstep = True
    has_complete_state = False
    sums_exactly = True
    supports_toggling = False
    reshard_after_forward: ClassVar[bool | None]
    """Argument of `fully_shard`. None reshards blocks after their forward pass, but not the root module."""
    averages_every_micro_batch: ClassVar[bool] = True
    """True if gradients are averaged and sharded in every micro-batch, not only in the last."""

    @classmethod
    def check(cls, settings: TrainerConfig) -> None:
        if settings.micro_batch_size == "auto":
            raise UserError(
                f"micro_batch_size is 'auto', but with strategy {settings.strategy!r} the ranks wait for "
                "each other in every forward pass. The search for a micro-batch size could deadlock if a "
                "rank runs out of memory. Set micro_batch_size to a number."
            )

    def place(self) -> None:
        """Shard the module block by block, so that no device requires memory for the complete module."""
        self._root: Callable[..., Any] = _Root(self.module)
        self._scalars = {parameter for parameter in self.module.parameters() if parameter.ndim == 0}
        self._is_pending = False
        if not self.context.is_distributed:
            self.module.to(self.context.device)
            return
        device = self.context.device
        self._mesh = init_device_mesh(device.type, (self.context.ranks.world_size,))
        self._parts = ShardedParameters(self._mesh)
        for scalar in self._scalars:
            self._broadcast(scalar)
        for unit in [*reversed(find_wrap_modules(self.module)), self._root]:
            assert isinstance(unit, nn.Module)
            own = [each for each in unit.parameters() if not isinstance(each, DTensor) and each.ndim]
            self._check_dtypes(own)
            for parameter in own:
                self._broadcast(parameter)
            fully_shard(
                unit,
                mesh=self._mesh,
                reshard_after_forward=self.reshard_after_forward,
                ignored_params=self._scalars,
            )
        broadcast_buffers(self.module)

    def summed_parameters(self) -> list[SummedParameter]:
        pairs = super().summed_parameters()
        if not self.context.is_distributed:
            return pairs
        for part in self._shard_modules():
            part.unshard()
        complete = dict(self.module.named_parameters())
        for part in self._shard_modules():
            part.reshard()
        return [replace(each, computed=complete[each.name]) for each in pairs]

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        self._is_pending = True
        if self.context.is_distributed and not self.settings.elastic_determinism:
            broadcast_buffers(self.module)
        with _explained():
            output: tuple[Any, float] = self._root(super().training_step, batch, batch_idx, num_samples)
        return output

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        late = [] if self.averages_every_micro_batch else self._shard_modules()
        for part in late:
            part.set_requires_gradient_sync(False, recurse=False)
        yield
        for part in late:
            part.set_requires_gradient_sync(True, recurse=False)

    def evaluation_step(self, method: str, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        with _explained():
            output: tuple[Any, float] = self._root(
                super().evaluation_step, method, batch, batch_idx, num_samples
            )
        for part in self._shard_modules():
            part.reshard()  # There is no backward pass to do this.
        return output

    def wrap_optimizers(self, optimization: OptimizerSetup) -> OptimizerSetup:
        if self.context.is_distributed:
            check_module_parameters(self.module, optimization.optimizers)
            for optimizer in optimization.optimizers:
                self._parts.shard_optimizer(optimizer, self.before_update)
        return optimization

    def before_update(self) -> None:
        """Average the gradients of parameters that cannot be sharded; all others are already averaged."""
        if not (self._is_pending and self.context.is_distributed):
            return
        self._is_pending = False
        if not self.settings.elastic_determinism:
            self._average_scalar_gradients()
        self._parts.assign_gradients()

    def _average_scalar_gradients(self) -> None:
        gradients = [scalar.grad for scalar in self._scalars if scalar.grad is not None]
        if gradients:
            together = torch.stack(gradients) / self.context.ranks.world_size
            dist.all_reduce(together)
            for gradient, mean in zip(gradients, together, strict=True):
                gradient.copy_(mean)

    def gradient_norm(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        if not self.context.is_distributed:
            return super().gradient_norm(parameters)
        return gradient_norm(parameters, self.context.device)

    def finish(self) -> str | None:
        """Gather the parameters on every rank, if they fit into its device's memory."""
        if not self.context.is_distributed:
            return None
        if self.context.all_reduce_min(float(fits_unsharded(self.module, self.context.device))) < 1:
            return (
                "The complete module does not fit into the memory of one device, so it remains sharded "
                "after training. To write the weights of a checkpoint to a file, use `hpctrain "
                "checkpoints export`."
            )
        unshard_module(self.module)
        return None

    def _check_dtypes(self, together: list[nn.Parameter]) -> None:
        trained = {each for each in together if each.requires_grad}
        names = {each.dtype: name for name, each in self.module.named_parameters() if each in trained}
        if len(names) > 1:
            (dtype, name), (other, other_name), *_ = names.items()
            raise UserError(
                f"strategy is {self.settings.strategy!r}, which gathers {name} ({dtype}) and {other_name} "
                f"({other}) together, so they must have the same type. Convert them to one type, or put the "
                "layers of each type into separate blocks of a Sequential, ModuleList or ModuleDict, or use "
                "strategy 'ddp'."
            )

    def _broadcast(self, parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(self.context.device)
        dist.broadcast(parameter.data, src=0)

    def _shard_modules(self) -> list[FSDPModule]:
        root = self._root
        assert isinstance(root, nn.Module)
        return [part for part in root.modules() if isinstance(part, FSDPModule)]


class ZeRO2(FullyShardedBase):
    """ZeRO stage 2: a block gathered for the forward pass remains gathered until the backward pass."""

    reshard_after_forward = False


class ZeRO3(FullyShardedBase):
    """ZeRO stage 3: a block is gathered for the forward pass, resharded, and gathered for the backward."""

    reshard_after_forward = None


class _Root(nn.Module):
    """Root module for `fully_shard`, to run any computation with the module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" in str(error):
            error.add_note(
                "hpctrain: A sharded parameter was used outside its block. Blocks of a Sequential, "
                "ModuleList or ModuleDict have their full parameters only during their own forward call. "
                "Call the block itself, not its submodules."
            )
        raise


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def find_wrap_modules(module: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model: the elements of Sequential, ModuleList and ModuleDict."""
    everywhere = _occurrences(module)
    units: dict[nn.Module, None] = {}
    for block in _blocks(module):
        inside = _occurrences(block)
        if inside and all(everywhere[parameter] == count for parameter, count in inside.items()):
            units[block] = None
    return list(units)


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS):
            yield child
        else:
            yield from _blocks(child)


def _occurrences(module: nn.Module) -> Counter[nn.Parameter]:
    """Count the occurrences of each parameter, except 0-dimensional parameters, which cannot be sharded."""
    named = module.named_parameters(remove_duplicate=False)
    return Counter(parameter for _, parameter in named if parameter.ndim)


def fits_unsharded(module: nn.Module, device: torch.device) -> bool:
    """Return true if this rank's device has enough memory for all complete parameters."""
    if device.type != "cuda":
        return True
    missing = sum(p.numel() * p.element_size() for p in module.parameters() if isinstance(p, DTensor))
    free, _ = torch.cuda.mem_get_info(device)
    return missing < 0.9 * free


def unshard_module(module: nn.Module) -> None:
    """Gather all parameters and remove all sharding."""
    for part in module.modules():
        fsdp_states.pop(part, None)
        for hooks in _hooks(part):
            for key in [key for key, hook in hooks.items() if _is_of_fsdp(hook)]:
                del hooks[key]
        for name in [name for name in vars(part) if name.startswith(FSDP_ATTRIBUTES)]:
            delattr(part, name)
        if isinstance(part, FSDPModule):
            # torch replaces the class with a new class, derived from FSDPModule and the original class.
            part.__class__ = type(part).__mro__[2]
    wholes: dict[torch.Tensor, nn.Parameter] = {}
    for part in module.modules():
        parameters: dict[str, Any] = part._parameters
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                if parameter not in wholes:
                    full = parameter.full_tensor().detach()
                    wholes[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                parameters[name] = wholes[parameter]


def _hooks(module: nn.Module) -> Iterator[dict[int, Any]]:
    for name, value in vars(module).items():
        if name.endswith("_hooks") and isinstance(value, dict):
            yield value


def _is_of_fsdp(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.fsdp")
