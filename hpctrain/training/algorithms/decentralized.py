"""Replicas that take the mean of their weights with one or two peers, and none with all.

Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", 2017; Tang et al.,
"Communication Compression for Decentralized Training", 2018, for the one in 8 bits (DCD-PSGD).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.runtime.process_group import Team
from hpctrain.training.algorithms.base import Algorithm, hook, leave_gradients
from hpctrain.training.algorithms.quantized import Quantized


class Decentralized(Algorithm):
    """After each step a rank takes the mean of its weights and a peer's, another peer every time."""

    shares_gradients = False

    def attach(self, parallel: DistributedDataParallel) -> None:
        hook(parallel, leave_gradients)

    def updated(self, step: int) -> None:
        peer = peer_of(self.team.ranks.rank, self.team.ranks.world_size, step)
        if peer is None:
            return
        own = self.weights.flat()
        theirs = torch.empty_like(own)
        exchange([(peer, own, theirs)])
        self.sent_bytes += own.nbytes
        self.weights.load((own + theirs) / 2)


class LowPrecisionDecentralized(Algorithm):
    """The ranks stand in a ring; each sends both neighbours what changed of its weights, in 8 bits.

    A rank knows its neighbours' weights exactly, for all apply the same rounded change, its sender too.
    """

    shares_gradients = False

    def begin(self, module: nn.Module, team: Team) -> None:
        super().begin(module, team)
        rank, size = team.ranks.rank, team.ranks.world_size
        self._neighbours = ((rank - 1) % size, (rank + 1) % size)
        self._know_all()

    def attach(self, parallel: DistributedDataParallel) -> None:
        hook(parallel, leave_gradients)

    def updated(self, step: int) -> None:  # noqa: ARG002
        moved = self.weights.flat() - self._own
        mean = (self._own + self._left + self._right) / 3
        change = Quantized.of((mean + moved - self._own).unsqueeze(0))
        left, right = (
            Quantized(torch.empty_like(change.codes), torch.empty_like(change.ranges)) for _ in range(2)
        )
        before, after = self._neighbours
        for name in ("codes", "ranges"):
            own = getattr(change, name)
            if before == after:
                exchange([(after, own, getattr(right, name))])
            else:
                exchange([(before, own, getattr(left, name)), (after, own, getattr(right, name))])
        self.sent_bytes += change.nbytes * len({before, after})
        self._own += change.restored()[0]
        self._right += right.restored()[0]
        self._left += (right if before == after else left).restored()[0]
        self.weights.load(self._own)

    def align(self) -> None:
        super().align()
        self._know_all()

    def load_state_dict(self, state: dict[str, object]) -> None:
        super().load_state_dict(state)
        if hasattr(self, "weights"):
            self._know_all()

    def _know_all(self) -> None:
        """All replicas are equal now."""
        self._own = self.weights.flat()
        self._left, self._right = self._own.clone(), self._own.clone()


def peer_of(rank: int, world_size: int, step: int) -> int | None:
    """Whom a rank meets in a step, as in a tournament: in so many steps everybody meets everybody once.

    One of the ranks stays, the others go round (the circle method); with an odd number one has nobody.
    """
    seats = world_size + world_size % 2
    turn = step % (seats - 1)
    if rank == seats - 1:
        peer = turn * (seats // 2) % (seats - 1)  # the one with 2 · peer ≡ turn
    elif (2 * rank) % (seats - 1) == turn:
        peer = seats - 1
    else:
        peer = (turn - rank) % (seats - 1)
    return None if peer >= world_size else peer


def exchange(transfers: list[tuple[int, torch.Tensor, torch.Tensor]]) -> None:
    """Send to and receive from peers at once: (peer, what is sent, where to put what comes)."""
    operations = []
    for peer, own, theirs in transfers:
        operations += [dist.P2POp(dist.isend, own, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
