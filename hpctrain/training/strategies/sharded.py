"""ZeRO stages 1 to 3: shard optimizer state, gradients and parameters over the ranks.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020; Zhao et al.,
"PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel", 2023. Based on torch's `fully_shard`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpctrain.errors import UserError
from hpctrain.torch_compat import FSDP_ATTRIBUTES, all_gather_single, fsdp_states, register_first_post_hook
from hpctrain.training.base.tensors import group_by_type
from hpctrain.training.module import Module
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, parameters_of
from hpctrain.training.strategies.ddp import DataParallelBase
from hpctrain.training.strategies.strategy import Strategy, broadcast_tensors

_BUCKET_BYTES = 25 << 20
#: Optimizers whose updates are impossible with shards, and the reason.
_UNSUPPORTED: dict[type[torch.optim.Optimizer], str] = {
    torch.optim.Adafactor: "needs complete rows and columns of each parameter",
    torch.optim.Adagrad: "creates its state before the parameters are sharded",
    torch.optim.Rprop: "selects elements by conditions, which torch does not support for shards",
}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class ZeRO1(DataParallelBase):
    """ZeRO stage 1: ddp with optimizer state sharded over the ranks.

    Each rank updates its rows of every parameter, then the ranks exchange the rows. With an element-wise
    optimizer, the result is bitwise equal to that of ddp.
    """

    has_complete_state = False

    def wrap_optimizers(self, optimization: OptimizerSetup) -> OptimizerSetup:
        self._shards: _ParameterShards | None = None
        if self.context.is_distributed:
            mesh = init_device_mesh(self.context.device.type, (self.context.ranks.world_size,))
            shards = self._shards = _ParameterShards(mesh)
            for optimizer in optimization.optimizers:
                shards.shard_optimizer(optimizer, self.before_update)
                # The script's own hooks then use the complete parameters.
                register_first_post_hook(optimizer, lambda updated, *_: shards.gather(updated))
        return optimization

    def before_update(self) -> None:
        if self._shards is not None:
            self._shards.assign_gradients()


class FullyShardedBase(Strategy):
    """Strategy in which each rank stores rows of all parameters, and a block is gathered for its use."""

    in_lockstep = True
    has_complete_state = False
    sums_exactly = True
    supports_toggling = False
    reshard_after_forward: ClassVar[bool | None]
    """Argument of `fully_shard`. None reshards blocks after their forward pass, but not the root module."""

    def place(self) -> None:
        """Shard the module block by block, so that no device requires memory for the complete module."""
        self._root: Callable[..., Any] = _Root(self.module)
        self._scalars = [parameter for parameter in self.module.parameters() if parameter.ndim == 0]
        self._is_pending = False
        if not self.context.is_distributed:
            self.module.to(self.context.device)
            return
        if inspect.signature(fully_shard).parameters["reshard_after_forward"].default is not None:
            raise self.torch_is_too_old()
        mesh = init_device_mesh(self.context.device.type, (self.context.ranks.world_size,))
        self._shards = _ParameterShards(mesh)
        for scalar in self._scalars:
            self._broadcast(scalar)
        for unit in [*reversed(_find_wrap_modules(self.module)), self._root]:
            assert isinstance(unit, nn.Module)
            unsharded = [p for p in unit.parameters() if not isinstance(p, DTensor) and p.ndim]
            self._check_dtypes(unsharded)
            for parameter in unsharded:
                self._broadcast(parameter)
            fully_shard(
                unit,
                mesh=mesh,
                reshard_after_forward=self.reshard_after_forward,
                ignored_params=set(self._scalars),
            )
        broadcast_tensors(self.module.buffers())

    def summed_parameters(self) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
        parameters = super().summed_parameters()
        if not self.context.is_distributed:
            return parameters
        for layer in self._shard_modules():
            layer.unshard()
        complete = dict(self.module.named_parameters())
        for layer in self._shard_modules():
            layer.reshard()
        return {name: (shard, complete[name]) for name, (shard, _) in parameters.items()}

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        self._is_pending = True
        if self.context.is_distributed and not self.settings.elastic_determinism:
            broadcast_tensors(self.module.buffers())
        return self._run(super().training_step, batch, batch_idx, num_samples)

    def evaluation_step(self, method: str, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        output = self._run(super().evaluation_step, method, batch, batch_idx, num_samples)
        for layer in self._shard_modules():
            layer.reshard()  # There is no backward pass to do this.
        return output

    def wrap_optimizers(self, optimization: OptimizerSetup) -> OptimizerSetup:
        if self.context.is_distributed:
            _check_parameters(self.module, optimization.optimizers)
            for optimizer in optimization.optimizers:
                self._shards.shard_optimizer(optimizer, self.before_update)
        return optimization

    def before_update(self) -> None:
        """Average the gradients of parameters that cannot be sharded; all others are already averaged."""
        if not (self._is_pending and self.context.is_distributed):
            return
        self._is_pending = False
        gradients = [scalar.grad for scalar in self._scalars if scalar.grad is not None]
        if gradients and not self.settings.elastic_determinism:
            message = torch.stack(gradients) / self.context.ranks.world_size
            dist.all_reduce(message)
            for gradient, mean in zip(gradients, message, strict=True):
                gradient.copy_(mean)
        self._shards.assign_gradients()

    def finish(self) -> str | None:
        """Gather the parameters on every rank, if they fit into its device's memory."""
        if not self.context.is_distributed:
            return None
        if self.context.all_reduce_min(float(_fits_unsharded(self.module, self.context.device))) < 1:
            return (
                "The complete module does not fit into the memory of one device, so it remains sharded "
                "after training. To write the weights of a checkpoint to a file, use `hpctrain "
                "checkpoints export`."
            )
        _unshard_module(self.module)
        return None

    def _check_dtypes(self, unsharded: list[nn.Parameter]) -> None:
        trained = {p for p in unsharded if p.requires_grad}
        names = {p.dtype: name for name, p in self.module.named_parameters() if p in trained}
        if len(names) > 1:
            parameters = " and ".join(f"{name} ({dtype})" for dtype, name in names.items())
            raise UserError(
                f"strategy is {self.settings.strategy!r}, which gathers {parameters} together, so they must "
                "have the same type. Convert them to one type, or put the layers of each type into separate "
                "blocks of a Sequential, ModuleList or ModuleDict, or use strategy 'ddp'."
            )

    def _run(self, step: Callable[..., tuple[Any, float]], *args: Any) -> tuple[Any, float]:
        try:
            output: tuple[Any, float] = self._root(step, *args)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" in str(error):
                error.add_note(
                    "hpctrain: A sharded parameter was used outside its block. Blocks of a Sequential, "
                    "ModuleList or ModuleDict have their full parameters only during their own forward call. "
                    "Call the block itself, not its submodules."
                )
            raise
        return output

    def _broadcast(self, parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(self.context.device)
        dist.broadcast(parameter.data, src=0)

    def _shard_modules(self) -> list[FSDPModule]:
        root = self._root
        assert isinstance(root, nn.Module)
        return [layer for layer in root.modules() if isinstance(layer, FSDPModule)]


class ZeRO2(FullyShardedBase):
    """ZeRO stage 2: a block gathered for the forward pass remains gathered until the backward pass."""

    reshard_after_forward = False


class ZeRO3(FullyShardedBase):
    """ZeRO stage 3: a block is gathered for the forward pass, resharded, and gathered for the backward."""

    reshard_after_forward = None


class _ParameterShards:
    """DTensor shards of replicated parameters: the rows of this rank, in the same memory.

    A parameter without dimensions cannot be sharded: its shard is the whole parameter, on every rank.
    Optimizer state has the size of the shard, and is a DTensor as well. Checkpoints contain complete
    DTensors, so they fit any number of ranks and any strategy.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._shards: dict[nn.Parameter, nn.Parameter] = {}

    def shard_optimizer(self, optimizer: torch.optim.Optimizer, before_step: Callable[[], None]) -> None:
        if reason := _UNSUPPORTED.get(type(optimizer)):
            raise UserError(
                f"{type(optimizer).__name__} {reason}, so it cannot be used with strategies that shard "
                "parameters or optimizer states. Use another optimizer, such as AdamW, or strategy 'ddp'."
            )
        if optimizer.state:
            raise UserError(
                f"The {type(optimizer).__name__} returned by configure_optimizers() has already performed "
                "steps, so its state cannot be sharded. Create a new optimizer in this method."
            )
        for group in optimizer.param_groups:
            group["params"] = [
                parameter if isinstance(parameter, DTensor) else self._shard(parameter)
                for parameter in group["params"]
            ]
        clear_shards = optimizer.zero_grad
        parameters = self._parameters_of(optimizer)

        def zero_grad(set_to_none: bool = True) -> None:
            clear_shards(set_to_none)
            for parameter in parameters:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        optimizer.register_step_pre_hook(lambda *_: before_step())

    def assign_gradients(self) -> None:
        """Assign to each shard its rows of the complete gradient, in the same memory."""
        for parameter, shard in self._shards.items():
            shard.grad = None if parameter.grad is None else self._cut(parameter.grad)

    def gather(self, optimizer: torch.optim.Optimizer) -> None:
        """Gather the complete parameters from the shards updated by the ranks."""
        parameters = self._parameters_of(optimizer)
        for group in group_by_type(p for p in parameters if p.ndim and p.numel() and p.requires_grad):
            bucket: list[nn.Parameter] = []
            for parameter in group:
                if bucket and sum(p.nbytes for p in bucket) + parameter.nbytes > _BUCKET_BYTES:
                    self._gather(bucket)
                    bucket = []
                bucket.append(parameter)
            self._gather(bucket)

    def _gather(self, parameters: list[nn.Parameter]) -> None:
        num_ranks = self._mesh.size()
        lengths = [-(-len(p) // num_ranks) * (p.numel() // len(p)) for p in parameters]
        message = torch.empty(sum(lengths), dtype=parameters[0].dtype, device=parameters[0].device)
        gathered = message.new_empty(num_ranks * len(message))
        with torch.no_grad():
            for parameter, piece in zip(parameters, torch.split(message, lengths), strict=True):
                rows = self._rows(parameter).reshape(-1)
                piece[: len(rows)] = rows
            all_gather_single(gathered, message, group=self._mesh.get_group())
            columns_of = torch.split(gathered.view(num_ranks, -1), lengths, dim=1)
            for parameter, columns in zip(parameters, columns_of, strict=True):
                parameter.copy_(columns.reshape(-1)[: parameter.numel()].view_as(parameter))

    def _parameters_of(self, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
        shards = {id(shard) for shard in parameters_of(optimizer)}
        return [parameter for parameter, shard in self._shards.items() if id(shard) in shards]

    def _shard(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter not in self._shards:
            shard = self._cut(parameter.detach())
            self._shards[parameter] = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        return self._shards[parameter]

    def _cut(self, tensor: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            self._rows(tensor),
            self._mesh,
            [Shard(0) if tensor.ndim else Replicate()],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0:
            return tensor
        num_rows = -(-len(tensor) // self._mesh.size())
        start = min(self._mesh.get_local_rank() * num_rows, len(tensor))
        return tensor[start : start + num_rows]


def _check_parameters(module: Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    parameters = set(module.parameters())
    for optimizer in optimizers:
        for parameter in parameters_of(optimizer):
            if parameter not in parameters:
                raise UserError(
                    f"The {type(optimizer).__name__} returned by {type(module).__name__}."
                    f"configure_optimizers() has a parameter of shape {tuple(parameter.shape)} that the "
                    "module does not have. Parameters are sharded before this method is called, so "
                    "create the optimizer in this method, from self.parameters()."
                )


class _Root(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)


def _find_wrap_modules(module: nn.Module) -> list[nn.Module]:
    """Return the innermost elements of containers, except blocks that share a parameter with the rest."""
    counts = _count_occurrences(module)
    blocks = dict.fromkeys(_blocks(module))
    return [
        block
        for block in blocks
        if (inside := _count_occurrences(block)) and inside.items() <= counts.items()
    ]


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, _CONTAINERS) and not isinstance(child, _CONTAINERS):
            yield child
        else:
            yield from _blocks(child)


def _count_occurrences(module: nn.Module) -> Counter[nn.Parameter]:
    """Count the occurrences of each parameter, except 0-dimensional parameters, which cannot be sharded."""
    named = module.named_parameters(remove_duplicate=False)
    return Counter(parameter for _, parameter in named if parameter.ndim)


def _fits_unsharded(module: nn.Module, device: torch.device) -> bool:
    if device.type != "cuda":
        return True
    missing = sum(p.numel() * p.element_size() for p in module.parameters() if isinstance(p, DTensor))
    free, _ = torch.cuda.mem_get_info(device)
    return missing < 0.9 * free


def _unshard_module(module: nn.Module) -> None:
    for layer in module.modules():
        fsdp_states.pop(layer, None)
        for name, hooks in vars(layer).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for key in [key for key, hook in hooks.items() if _is_of_fsdp(hook)]:
                    del hooks[key]
        for name in [name for name in vars(layer) if name.startswith(FSDP_ATTRIBUTES)]:
            delattr(layer, name)
        if isinstance(layer, FSDPModule):
            # torch replaces the class with a new class, derived from FSDPModule and the original class.
            layer.__class__ = type(layer).__mro__[2]
    complete: dict[torch.Tensor, nn.Parameter] = {}
    for layer in module.modules():
        parameters: dict[str, Any] = layer._parameters
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                if parameter not in complete:
                    full = parameter.full_tensor().detach()
                    complete[parameter] = nn.Parameter(full, requires_grad=parameter.requires_grad)
                parameters[name] = complete[parameter]


def _is_of_fsdp(hook: Any) -> bool:
    function = getattr(hook, "hook", hook)
    return str(getattr(function, "__module__", "")).startswith("torch.distributed.fsdp")
