"""Horovod: its DistributedOptimizer averages gradients, over gloo, or what else it was built with.

Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning in TensorFlow", 2018.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Iterator, MutableMapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training.module import Module
from hpctrain.training.optimization import Optimization, parameters_of
from hpctrain.training.strategies.base import Strategy
from hpctrain.training.strategies.buffers import share_buffers

if TYPE_CHECKING:
    from hpctrain.training.settings import Settings

#: Set for a process that horovodrun has started, or that has met the others before.
_MARK = "HOROVOD_RANK"


class Horovod(Strategy):
    """Under horovodrun the ranks meet at its server; under any other launcher rank 0 hosts one."""

    has_turns = False

    @classmethod
    def check(cls, settings: Settings) -> None:
        if find_spec("horovod") is None:
            raise UserError(
                f"strategy is {settings.strategy!r}, and Horovod is not installed here. It has no builds to "
                "download for current versions of PyTorch: scripts/install_horovod.sh in hpctrain's source "
                "builds and installs it. Strategy 'ddp' does the same without it."
            )
        if settings.precision == "bf16-true":
            raise UserError(
                "precision 'bf16-true' does not go with strategy 'horovod': Horovod cannot send bfloat16. "
                "Take 'bf16-mixed', whose gradients are in float32, or strategy 'ddp'."
            )

    def __init__(self, module: Module, team: Team, settings: Settings) -> None:
        """Begin Horovod, and broadcast rank 0's parameters and buffers. All ranks must call this."""
        super().__init__(module, team, settings)
        self._optimizers: list[Any] = []
        self._is_pending = False
        self._stack = contextlib.ExitStack()
        if team.is_distributed:
            self._horovod: Any = _imported()
            if not self._horovod.is_initialized():
                with contextlib.nullcontext() if _MARK in os.environ else _meeting(team, os.environ):
                    self._horovod.init()
            self._horovod.broadcast_parameters(module.state_dict(), root_rank=0)

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        if self.team.is_distributed:
            share_buffers(self.module)
        return super().training_step(batch, batch_idx, num_samples)

    def backward(self, loss: torch.Tensor) -> None:
        self._is_pending = True
        super().backward(loss)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        for optimizer in self._optimizers:
            optimizer.set_backward_passes_per_step(2)  # so that this pass is not the last one
        yield

    def optimized(self, optimization: Optimization) -> Optimization:
        if not self.team.is_distributed:
            return optimization
        for original in optimization.optimizers:
            own = {parameter for group in original.param_groups for parameter in group["params"]}
            named = [(name, p) for name, p in self.module.named_parameters() if p in own]
            optimizer = self._horovod.DistributedOptimizer(original, named_parameters=named)
            # A schedule holds the original, and loading a state makes new groups: they share all they have.
            _as_torch_has_it(optimizer)
            original.__dict__ = optimizer.__dict__
            # Gradients are complete before the step: they may have to be clipped.
            self._stack.enter_context(optimizer.skip_synchronize())
            self._optimizers.append(optimizer)
        return Optimization(tuple(self._optimizers), optimization.schedulers)

    def before_update(self) -> None:
        if not (self._is_pending and self.team.is_distributed):
            return
        self._is_pending = False
        unused = self._find_unused() if self.settings.find_unused_parameters else ()
        for optimizer in self._optimizers:
            optimizer.synchronize()
            optimizer.set_backward_passes_per_step(1)
        for parameter in unused:
            parameter.grad = None

    def _find_unused(self) -> list[torch.Tensor]:
        """Parameters without a gradient on any rank; Horovod would make zeros of these."""
        parameters = [p for optimizer in self._optimizers for p in parameters_of(optimizer)]
        has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
        dist.all_reduce(has, group=self.team.control)
        return [
            parameter for parameter, anywhere in zip(parameters, has.tolist(), strict=True) if not anywhere
        ]

    def align_buffers(self) -> None:
        if self.team.is_distributed:
            share_buffers(self.module)

    def finish(self) -> str | None:
        self._stack.close()
        return None


def _imported() -> Any:
    """Horovod for PyTorch.

    Raises:
        UserError: it was built for another PyTorch, or without one.
    """
    try:
        return importlib.import_module("horovod.torch")
    except ImportError as error:
        raise UserError(
            f"Horovod is installed, but does not load with PyTorch {torch.__version__}: {error}. "
            "scripts/install_horovod.sh in hpctrain's source builds it for this one."
        ) from error


def _as_torch_has_it(optimizer: Any) -> None:
    """Give back what Horovod's optimizer has lost.

    A schedule wraps the step, and warns where that is another one now; `zero_grad` has an argument.
    """
    step, zero_grad = optimizer.step, optimizer.zero_grad
    optimizer.zero_grad = lambda set_to_none=True: zero_grad()  # noqa: ARG005

    @functools.wraps(step)
    def known(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **kwargs)

    known._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = known


@contextlib.contextmanager
def _meeting(team: Team, environ: MutableMapping[str, str]) -> Iterator[None]:
    """Set meanwhile what horovodrun would have set, with a server of rank 0's own. All ranks must call this.

    Args:
        team: the ranks.
        environ: the process's own variables, which Horovod reads when it begins.
    """
    ranks = team.ranks
    places = team.gather((ranks.node_rank, ranks.local_rank))
    plan = [_slot(places, rank) for rank in range(ranks.world_size)]
    port = None
    if ranks.is_main:
        server = importlib.import_module("horovod.runner.http.http_server").RendezvousServer()
        port = server.start()
        slot_info = importlib.import_module("horovod.runner.common.util.hosts").SlotInfo
        server.init([slot_info(**slot) for slot in plan])
    slot = plan[ranks.rank]
    variables = {
        f"HOROVOD_{name.upper()}": str(slot[name])
        for name in ("hostname", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    }
    variables |= {
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": ranks.master_addr,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(team.from_main(port)),
    }
    if interface := environ.get("GLOO_SOCKET_IFNAME"):
        variables["HOROVOD_GLOO_IFACE"] = interface
    environ.update(variables)
    try:
        yield
    finally:
        # Left there, they would tell the next detection that horovodrun has started this process.
        for name in variables:
            del environ[name]


def _slot(places: list[tuple[int, int]], rank: int) -> dict[str, Any]:
    """A rank's place as Horovod has it, out of the node and the local rank of each."""
    node, local_rank = places[rank]
    across = sorted(other for other, its_local_rank in places if its_local_rank == local_rank)
    return {
        "hostname": f"node-{node}",
        "rank": rank,
        "size": len(places),
        "local_rank": local_rank,
        "local_size": sum(other == node for other, _ in places),
        "cross_rank": across.index(node),
        "cross_size": len(across),
    }
