"""Average weights instead of gradients: with peers, periodically, or in the background."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.algorithms.base import Algorithm, noop_hook, register_comm_hook
from hpctrain.training.algorithms.compression import QuantizedRows


class Decentralized(Algorithm):
    """Averaging of weights with one peer after each step; the peer changes every step."""

    shares_gradients = False

    def attach(self, parallel: DistributedDataParallel) -> None:
        register_comm_hook(parallel, noop_hook)

    def on_optimizer_step_end(self, step: int) -> None:
        peer = tournament_peer(self.context.ranks.rank, self.context.ranks.world_size, step)
        if peer is None:
            return
        own = self.weights.flat()
        theirs = torch.empty_like(own)
        exchange_tensors([(peer, own, theirs)])
        self.sent_bytes += own.nbytes
        self.weights.load((own + theirs) / 2)


class LowPrecisionDecentralized(Algorithm):
    """Averaging with both neighbors in a ring of ranks, which exchange changes of weights in 8 bits."""

    shares_gradients = False

    def begin(self, module: nn.Module, context: DistributedContext) -> None:
        super().begin(module, context)
        rank, size = context.ranks.rank, context.ranks.world_size
        self._neighbours = ((rank - 1) % size, (rank + 1) % size)
        self._reset_copies()

    def attach(self, parallel: DistributedDataParallel) -> None:
        register_comm_hook(parallel, noop_hook)

    def on_optimizer_step_end(self, step: int) -> None:  # noqa: ARG002
        moved = self.weights.flat() - self._own
        mean = (self._own + self._left + self._right) / 3
        change = QuantizedRows.quantize((mean + moved - self._own).unsqueeze(0))
        left, right = (
            QuantizedRows(torch.empty_like(change.codes), torch.empty_like(change.ranges)) for _ in range(2)
        )
        before, after = self._neighbours
        for name in ("codes", "ranges"):
            own = getattr(change, name)
            if before == after:
                exchange_tensors([(after, own, getattr(right, name))])
            else:
                exchange_tensors([(before, own, getattr(left, name)), (after, own, getattr(right, name))])
        self.sent_bytes += change.nbytes * len({before, after})
        self._own += change.dequantize()[0]
        self._right += right.dequantize()[0]
        self._left += (right if before == after else left).dequantize()[0]
        self.weights.load(self._own)

    def synchronize(self) -> None:
        super().synchronize()
        self._reset_copies()

    def load_state_dict(self, state: dict[str, object]) -> None:
        super().load_state_dict(state)
        if hasattr(self, "weights"):
            self._reset_copies()

    def _reset_copies(self) -> None:
        self._own = self.weights.flat()
        self._left, self._right = self._own.clone(), self._own.clone()


def tournament_peer(rank: int, world_size: int, step: int) -> int | None:
    """Return the peer of a rank in a step; every pair of ranks occurs once per cycle."""
    seats = world_size + world_size % 2
    turn = step % (seats - 1)
    if rank == seats - 1:
        peer = turn * (seats // 2) % (seats - 1)  # solves 2 · peer ≡ turn
    elif (2 * rank) % (seats - 1) == turn:
        peer = seats - 1
    else:
        peer = (turn - rank) % (seats - 1)
    return None if peer >= world_size else peer


def exchange_tensors(transfers: list[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
    """Exchange tensors with all peers concurrently: (peer, tensor to send, receive buffer)."""
    operations = []
    for peer, own, theirs in transfers:
        operations += [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


class LocalSGD(Algorithm):
    """Averaging of weights every `every` steps, without communication in between."""

    shares_gradients = False

    def __init__(self, every: int = 4) -> None:
        """Average after every `every` steps."""
        super().__init__()
        self.every = every

    def attach(self, parallel: DistributedDataParallel) -> None:
        register_comm_hook(parallel, noop_hook)

    def on_optimizer_step_end(self, step: int) -> None:
        if step % self.every == 0:
            self.average(self.weights.parameters)


class AsyncAveraging(Algorithm):
    """Continuous averaging of weights in the background while each replica trains."""

    shares_gradients = False

    def begin(self, module: nn.Module, context: DistributedContext) -> None:
        super().begin(module, context)
        # A separate group: ranks start averaging at different steps, between other collectives.
        self._group = dist.new_group()
        self._num_started = 0
        self._weights_before: torch.Tensor
        self._sum: torch.Tensor
        self._pending: Any = None

    def attach(self, parallel: DistributedDataParallel) -> None:
        register_comm_hook(parallel, noop_hook)

    def on_optimizer_step_end(self, step: int) -> None:  # noqa: ARG002
        if self._pending is None:
            self._start_average()
        elif self._pending.is_completed():
            self._apply_average()
            self._start_average()

    def synchronize(self) -> None:
        # Slower ranks start the averaging operations that other ranks have already started.
        for _ in range(max(self.context.all_gather(self._num_started)) - self._num_started):
            if self._pending is not None:
                self._apply_average()
            self._start_average()
        if self._pending is not None:
            self._apply_average()
        super().synchronize()

    def _start_average(self) -> None:
        self._weights_before = self.weights.flat()
        self._sum = self._weights_before.clone()
        self.sent_bytes += self._sum.nbytes
        self._pending = dist.all_reduce(self._sum, group=self._group, async_op=True)
        self._num_started += 1

    def _apply_average(self) -> None:
        self._pending.wait()
        self._pending = None
        mean = self._sum / self.context.ranks.world_size
        self.weights.load(mean + (self.weights.flat() - self._weights_before))
