"""Average weights instead of gradients: with peers, periodically, or in the background."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.algorithms.algorithm import BucketAlgorithm
from hpctrain.training.algorithms.compression import QuantizedRows


class Decentralized(BucketAlgorithm):
    """Averaging of weights with one peer after each step; the peer changes every step.

    Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", 2017.
    """

    shares_gradients = False

    def on_optimizer_step_end(self, step: int) -> None:
        peer = tournament_peer(self.context.ranks.rank, self.context.ranks.world_size, step)
        if peer is None:
            return
        weights = self.flat_weights()
        peer_weights = torch.empty_like(weights)
        exchange_tensors([(peer, weights, peer_weights)])
        self.sent_bytes += weights.nbytes
        self.load_weights((weights + peer_weights) / 2)


class LowPrecisionDecentralized(BucketAlgorithm):
    """Averaging with both neighbors in a ring of ranks, which exchange changes of weights in 8 bits.

    DCD-PSGD: Tang et al., "Communication Compression for Decentralized Training", 2018. Each rank has exact
    copies of its neighbors' weights: sender and receivers apply the same rounded change.
    """

    shares_gradients = False

    def begin(self, module: nn.Module, context: DistributedContext) -> None:
        super().begin(module, context)
        rank, size = context.ranks.rank, context.ranks.world_size
        self._neighbours = ((rank - 1) % size, (rank + 1) % size)
        self._reset_copies()

    def on_optimizer_step_end(self, step: int) -> None:  # noqa: ARG002
        moved = self.flat_weights() - self._weights
        mean = (self._weights + self._left + self._right) / 3
        change = QuantizedRows.quantize((mean + moved - self._weights).unsqueeze(0))
        left, right = (QuantizedRows(*map(torch.empty_like, change)) for _ in range(2))
        before, after = self._neighbours
        for sent, of_left, of_right in zip(change, left, right, strict=True):
            transfers = [(before, sent, of_left), (after, sent, of_right)]
            exchange_tensors(transfers[1:] if before == after else transfers)
        self.sent_bytes += change.nbytes * len({before, after})
        self._weights += change.dequantize()[0]
        self._right += right.dequantize()[0]
        self._left += (right if before == after else left).dequantize()[0]
        self.load_weights(self._weights)

    def synchronize(self) -> None:
        super().synchronize()
        self._reset_copies()

    def load_state_dict(self, state: dict[str, object]) -> None:
        super().load_state_dict(state)
        if self.parameters:
            self._reset_copies()

    def _reset_copies(self) -> None:
        self._weights = self.flat_weights()
        self._left, self._right = self._weights.clone(), self._weights.clone()


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
    operations = []
    for peer, sent, received in transfers:
        operations += [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


class LocalSGD(BucketAlgorithm):
    """Averaging of weights every `every` steps, without communication in between.

    Stich, "Local SGD Converges Fast and Communicates Little", 2019.
    """

    shares_gradients = False

    def __init__(self, every: int = 4) -> None:
        super().__init__()
        self.every = every

    def on_optimizer_step_end(self, step: int) -> None:
        if step % self.every == 0:
            self.average(self.parameters)


class AsyncAveraging(BucketAlgorithm):
    """Continuous averaging of weights in the background while each replica trains.

    A rank adds its progress since the start of the averaging to the mean of all weights. No step waits. Based
    on Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", 2021.
    """

    shares_gradients = False

    def begin(self, module: nn.Module, context: DistributedContext) -> None:
        super().begin(module, context)
        # A separate group: ranks start averaging at different steps, between other collectives.
        self._group = dist.new_group()
        self._num_started = 0
        self._weights_before: torch.Tensor
        self._sum: torch.Tensor
        self._pending: Any = None

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
        self._weights_before = self.flat_weights()
        self._sum = self._weights_before.clone()
        self.sent_bytes += self._sum.nbytes
        self._pending = dist.all_reduce(self._sum, group=self._group, async_op=True)
        self._num_started += 1

    def _apply_average(self) -> None:
        self._pending.wait()
        self._pending = None
        mean = self._sum / self.context.ranks.world_size
        self.load_weights(mean + (self.flat_weights() - self._weights_before))
