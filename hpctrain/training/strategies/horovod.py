"""Average gradients with Horovod's DistributedOptimizer, over gloo or another compiled-in backend.

Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator, MutableMapping
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.module import Module
from hpctrain.training.optim.optimizer_setup import OptimizerSetup, parameters_of
from hpctrain.training.strategies.strategy import Strategy, broadcast_tensors
from hpctrain.training.trainer_config import TrainerConfig

#: Environment variable of processes started by horovodrun.
_MARK = "HOROVOD_RANK"


class Horovod(Strategy):
    """Strategy with a rendezvous at horovodrun's server or, with other launchers, at a server on rank 0."""

    supports_toggling = False

    @classmethod
    def check(cls, settings: TrainerConfig) -> None:
        if find_spec("horovod") is None:
            raise UserError(
                f"strategy is {settings.strategy!r}, but Horovod is not installed. There are no prebuilt "
                "packages for current versions of PyTorch. To build and install it, run "
                "scripts/install_horovod.sh in a clone of hpctrain's repository. Strategy 'ddp' is "
                "equivalent and does not require Horovod."
            )
        if settings.precision == "bf16-true":
            raise UserError(
                "precision='bf16-true' does not work with strategy='horovod', because Horovod cannot "
                "send bfloat16. Use 'bf16-mixed', whose gradients are float32, or strategy 'ddp'."
            )

    def __init__(self, module: Module, context: DistributedContext, settings: TrainerConfig) -> None:
        super().__init__(module, context, settings)
        self._optimizers: list[Any] = []
        self._is_pending = False
        self._stack = contextlib.ExitStack()
        if context.is_distributed:
            self._horovod: Any = _import_horovod()
            if not self._horovod.is_initialized():
                is_launched = _MARK in os.environ
                with contextlib.nullcontext() if is_launched else _rendezvous_variables(context, os.environ):
                    self._horovod.init()
            self._horovod.broadcast_parameters(module.state_dict(), root_rank=0)

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        if self.context.is_distributed:
            broadcast_tensors(self.module.buffers())
        return super().training_step(batch, batch_idx, num_samples)

    def backward(self, loss: torch.Tensor) -> None:
        self._is_pending = True
        super().backward(loss)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        for optimizer in self._optimizers:
            optimizer.set_backward_passes_per_step(2)  # this pass is then not the last pass
        yield

    def wrap_optimizers(self, optimization: OptimizerSetup) -> OptimizerSetup:
        if not self.context.is_distributed:
            return optimization
        for original in optimization.optimizers:
            parameters = set(parameters_of(original))
            named = [(name, p) for name, p in self.module.named_parameters() if p in parameters]
            optimizer = self._horovod.DistributedOptimizer(original, named_parameters=named)
            # Schedules refer to the original optimizer, and loading a state creates new groups: share all
            # attributes.
            _restore_torch_interface(optimizer)
            original.__dict__ = optimizer.__dict__
            # `before_update` completes the gradients before the step, because they may have to be clipped.
            self._stack.enter_context(optimizer.skip_synchronize())
            self._optimizers.append(optimizer)
        return OptimizerSetup(tuple(self._optimizers), optimization.schedulers)

    def before_update(self) -> None:
        if not (self._is_pending and self.context.is_distributed):
            return
        self._is_pending = False
        unused = self._find_unused() if self.settings.find_unused_parameters else ()
        for optimizer in self._optimizers:
            optimizer.synchronize()
            optimizer.set_backward_passes_per_step(1)
        for parameter in unused:
            parameter.grad = None

    def _find_unused(self) -> list[torch.Tensor]:
        """Return parameters without a gradient on any rank, for which Horovod would create zeros."""
        parameters = [p for optimizer in self._optimizers for p in parameters_of(optimizer)]
        counts = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        dist.all_reduce(counts, group=self.context.cpu_group)
        return [parameter for parameter, count in zip(parameters, counts.tolist(), strict=True) if not count]

    def finish(self) -> str | None:
        self._stack.close()
        return None


def _import_horovod() -> Any:
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise UserError(
            f"Horovod is installed, but cannot be loaded with PyTorch {torch.__version__}: {error}\nTo "
            "rebuild Horovod for this version, run scripts/install_horovod.sh in a clone of hpctrain's "
            "repository."
        ) from error


def _restore_torch_interface(optimizer: Any) -> None:
    """Restore what LR schedulers and `zero_grad` of torch's optimizers have and Horovod's lack."""
    step, zero_grad = optimizer.step, optimizer.zero_grad
    optimizer.zero_grad = lambda set_to_none=True: zero_grad()  # noqa: ARG005

    @functools.wraps(step)
    def marked_step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **kwargs)

    marked_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = marked_step


@contextlib.contextmanager
def _rendezvous_variables(context: DistributedContext, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Set horovodrun's variables inside this block, with a server on rank 0."""
    ranks = context.ranks
    placements = context.all_gather((ranks.node_rank, ranks.local_rank))
    slots = [_slot(placements, rank) for rank in range(ranks.world_size)]
    port = None
    if ranks.is_main:
        server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
        port = server.start()
        slot_info = importlib.import_module("horovod.runner.common.util.hosts").SlotInfo
        server.init([slot_info(**slot) for slot in slots])
    variables = {f"HOROVOD_{name.upper()}": str(value) for name, value in slots[ranks.rank].items()}
    variables |= {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": ranks.master_addr,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(context.broadcast_from_main(port)),
    }
    if interface := environ.get("GLOO_SOCKET_IFNAME"):
        variables["HOROVOD_GLOO_IFACE"] = interface
    environ.update(variables)
    try:
        yield
    finally:
        # Otherwise, the next launcher detection would find horovodrun.
        for name in variables:
            del environ[name]


def _slot(placements: list[tuple[int, int]], rank: int) -> dict[str, Any]:
    node, local_rank = placements[rank]
    cross_nodes = sorted(place[0] for place in placements if place[1] == local_rank)
    return {
        "hostname": f"node-{node}",
        "rank": rank,
        "size": len(placements),
        "local_rank": local_rank,
        "local_size": sum(place[0] == node for place in placements),
        "cross_rank": cross_nodes.index(node),
        "cross_size": len(cross_nodes),
    }
