"""What the ranks tell each other: losses, a wish to stop, a wish to save, news of the data.

The sum travels while the next step computes and is read at its end, so no step waits for it. All ranks
read the same sum at the same step, which is what makes a stop agreed: nobody asks, nobody can disagree.
Short steps are told of several at a time (see `Grouping`), without a change of their last bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training.grouping import Grouping
from hpctrain.training.records import OWN_FIELDS
from hpctrain.training.spent import Moment
from hpctrain.training.sums import TOKENS, ScalarSums

#: So many ranks tell of several steps in one message. More of them hardly have steps that are so short.
_FEW = 32


@dataclass(frozen=True)
class StepResult:
    """One step, summed over all ranks; the same value on every rank, but for `ended`."""

    step: int
    epoch: int
    scalars: dict[str, float]
    """Means over the global batch; `loss` is among them. `num_tokens`, where there is one, is a sum."""
    ended: Moment | None
    """When it was trained, where this rank is to log it."""


@dataclass(frozen=True)
class Wishes:
    """What one rank wants, or what all want together."""

    stop: bool = False
    """It was told to stop."""
    save: bool = False
    """It wants a checkpoint."""
    end: bool = False
    """It wants the training to end with what it has reached."""
    news: float = 0.0
    """What its feed has to tell."""


class Reports:
    """What this rank tells the others of its steps, and what they tell. All ranks must call each method."""

    def __init__(self, team: Team, *, one_by_one: bool) -> None:
        """Begin.

        Args:
            team: the ranks that take part.
            one_by_one: whether each step is told of before the next but one, however short it is.
        """
        self._team = team
        self._grouping = Grouping(one_by_one=one_by_one or team.ranks.world_size > _FEW)
        self._own: list[_Own] = []
        self._sent: list[_Own] = []
        self._names: list[str] | None = None
        self._read: Callable[[], list[float]] | None = None

    def begin(self) -> None:
        """Training goes on after something else."""
        self._grouping.begin()

    def add(self, step: int, epoch: int, sums: ScalarSums, ended: Moment | None) -> None:
        """Note a step that this rank has trained; the names in `sums` must be those of the other ranks."""
        self._own.append(_Own(step, epoch, sums, ended))
        self._grouping.add()

    @property
    def are_due(self) -> bool:
        """Whether what was noted is to be sent now."""
        return self._grouping.is_full

    @property
    def are_under_way(self) -> bool:
        """Whether something was sent that is not read yet."""
        return self._read is not None

    def send(self, own: Wishes) -> None:
        """Send what was noted, and what this rank wants."""
        flags = [float(own.stop), float(own.save), float(own.end), own.news, self._grouping.take()]
        self._sent, self._own = self._own, []
        if self._names is None:
            self._names = self._agreed_names()
        # A message is as long on all ranks. A rank with other names than are agreed on says so, and no more.
        names = dict.fromkeys(self._names).keys()
        others = any(each.sums.values.keys() != names for each in self._sent)
        values = self._values()
        if others:
            values = [0.0 for _ in range(len(names) * len(self._sent))]
        self._read = _send(self._team, [*flags, float(others)], values)

    def read(self) -> tuple[Wishes, list[StepResult]]:
        """Wait for what all ranks have sent, which has had a step's time to arrive.

        Raises:
            RuntimeError: nothing was sent.
            UserError: on all ranks alike: they have not the same metrics of a step.
        """
        if self._read is None:
            raise RuntimeError("nothing was sent")
        stop, save, end, news, seconds, others, *values = self._read()
        self._read = None
        self._grouping.hear(seconds / self._team.ranks.world_size)
        if others:
            self._names = self._agreed_names()
            values = _send(self._team, [], self._values())()
        results, rest = [], iter(values)
        for own in self._sent:
            # The names come first: zip takes no value more than there are names.
            scalars = dict(zip(sorted(own.sums.values), rest, strict=False))
            if scalars.get(TOKENS):
                scalars["loss"] /= scalars[TOKENS]
            results.append(StepResult(own.step, own.epoch, scalars, own.ended))
        return Wishes(stop > 0, save > 0, end > 0, news), results

    def _values(self) -> list[torch.Tensor | float]:
        return [each.sums.values[name] for each in self._sent for name in sorted(each.sums.values)]

    def _agreed_names(self) -> list[str]:
        own = [sorted(each.sums.values) for each in self._sent]
        for rank, names in enumerate(told := self._team.gather(own)):
            for step, first, other in zip(self._sent, told[0], names, strict=True):
                if other != first:
                    raise UserError(
                        f"The metrics of step {step.step} are {first} on rank 0, but {other} on rank {rank}. "
                        "Give the same names on every rank, also where there is nothing to tell."
                    )
        if taken := sorted(set(own[-1]).intersection(OWN_FIELDS)):
            raise UserError(f"A metric is called {taken[0]!r}, which is a field of metrics.jsonl. Rename it.")
        return own[-1]


class _Own(NamedTuple):
    """A step of this rank."""

    step: int
    epoch: int
    sums: ScalarSums
    ended: Moment | None


def _send(team: Team, flags: list[float], scalars: list[torch.Tensor | float]) -> Callable[[], list[float]]:
    """Begin to sum over all ranks; returns what waits for the sum."""
    device = team.device
    if device.type == "cpu":
        return begin_sum(team, [*flags, *map(float, scalars)])
    values = [torch.as_tensor(scalar, dtype=torch.float64) for scalar in scalars]
    host = torch.tensor(flags, dtype=torch.float64)
    own = torch.cat(
        [host.to(device, non_blocking=True), *(v.reshape(1).to(device, non_blocking=True) for v in values)]
    )
    told, pending = _exchange(team, own, None) if team.is_distributed else (own[None], None)
    # The copy to the host has a stream of its own: read on the stream that computes, the value would have to
    # wait for the step after, which is queued there by then.
    aside = _stream_aside(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    arrived = torch.empty(told.shape, dtype=torch.float64, pin_memory=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(aside):
        if pending is not None:
            pending.wait()
        arrived.copy_(told, non_blocking=True)
        event.record(aside)
    # The memory of `told` may be used anew only when the copy is done.
    told.record_stream(aside)

    def read() -> list[float]:
        event.synchronize()
        return _sum(arrived)

    return read


def begin_sum(team: Team, own: list[float]) -> Callable[[], list[float]]:
    """Begin to sum numbers of the hosts over all ranks; returns what waits for the sum."""
    if not team.is_distributed:
        return lambda: own
    told, pending = _exchange(team, torch.tensor(own, dtype=torch.float64), team.control)

    def read() -> list[float]:
        pending.wait()
        return _sum(told)

    return read


def _exchange(team: Team, own: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, Any]:
    """Begin to exchange numbers; a row of each rank's, or one of their sum, and what waits for it.

    An all-reduce adds in an order that depends on where in the message a number stands. That is the same in
    every message that tells of one step; in others, each rank adds the numbers in the order of the ranks.
    """
    if team.ranks.world_size > _FEW:
        return own[None], dist.all_reduce(own, group=group, async_op=True)
    told = own.new_empty((team.ranks.world_size, len(own)))
    return told, dist.all_gather(list(told), own, group=group, async_op=True)


def _sum(rows: torch.Tensor) -> list[float]:
    return [sum(column) for column in zip(*rows.tolist(), strict=True)]


_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


def _stream_aside(device: torch.device) -> torch.cuda.Stream:
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return _STREAMS[device]
