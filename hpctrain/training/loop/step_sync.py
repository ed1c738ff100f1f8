"""Exchange between the ranks after each step: losses, stop and save requests, data news.

The sum is computed during the next step and read at its end, so no step waits for it. All ranks read the same
sum at the same step, so they agree on a stop without further messages. Short steps share a message (see
`MessageBatcher`), with bitwise the same results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.base.metric_accumulator import TOKENS_FIELD, MetricAccumulator
from hpctrain.training.loop.message_batcher import MessageBatcher
from hpctrain.training.observe.metrics_file import RESERVED_FIELDS
from hpctrain.training.observe.step_timer import TimingSample

#: Maximum number of ranks with several steps per message. With more ranks, such short steps are rare.
_FEW = 32


@dataclass(frozen=True)
class StepResult:
    """Result of one step, summed over all ranks; the same on every rank except for `ended`."""

    step: int
    epoch: int
    scalars: dict[str, float]
    """Means over the global batch, including `loss`. `num_tokens`, if present, is a sum."""
    ended: TimingSample | None
    """Time sample of the step, if this rank logs it."""


@dataclass(frozen=True)
class StepFlags:
    """Requests of one rank, or of all ranks together."""

    stop: bool = False
    """A stop signal arrived."""
    save: bool = False
    """A checkpoint is requested."""
    end: bool = False
    """The training is to end with the steps done so far."""
    news: float = 0.0
    """Value from the step source, to be summed over all ranks."""


class StepSync:
    """Exchange of step results and requests. All ranks must call each method."""

    def __init__(self, team: DistributedContext, *, one_by_one: bool) -> None:
        """Start with an empty exchange.

        Args:
            team: the ranks that take part.
            one_by_one: if true, each step is sent before the next but one, however short it is.
        """
        self._team = team
        self._grouping = MessageBatcher(one_by_one=one_by_one or team.ranks.world_size > _FEW)
        self._own: list[_Own] = []
        self._sent: list[_Own] = []
        self._names: list[str] | None = None
        self._read: Callable[[], list[float]] | None = None

    def begin(self) -> None:
        """Restart the clock when training continues after other work."""
        self._grouping.begin()

    def add(self, step: int, epoch: int, sums: MetricAccumulator, ended: TimingSample | None) -> None:
        """Record a step trained by this rank; the names in `sums` must be the same on all ranks."""
        self._own.append(_Own(step, epoch, sums, ended))
        self._grouping.add()

    @property
    def are_due(self) -> bool:
        """True if the recorded steps are to be sent now."""
        return self._grouping.is_full

    @property
    def are_under_way(self) -> bool:
        """True if a sent message is not yet read."""
        return self._read is not None

    def send(self, own: StepFlags) -> None:
        """Send the recorded steps and this rank's requests."""
        flags = [float(own.stop), float(own.save), float(own.end), own.news, self._grouping.take()]
        self._sent, self._own = self._own, []
        if self._names is None:
            self._names = self._agreed_names()
        # Messages have the same length on all ranks. A rank with other names sends zeros and sets a flag.
        names = dict.fromkeys(self._names).keys()
        others = any(each.sums.values.keys() != names for each in self._sent)
        values = self._values()
        if others:
            values = [0.0 for _ in range(len(names) * len(self._sent))]
        self._read = _send(self._team, [*flags, float(others)], values)

    def read(self) -> tuple[StepFlags, list[StepResult]]:
        """Wait for the sum over all ranks, which had a step's time to arrive.

        Raises:
            RuntimeError: nothing was sent.
            UserError: on all ranks: the ranks have different metrics for a step.
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
            # The names come first, so that zip does not take a value too many from `rest`.
            scalars = dict(zip(sorted(own.sums.values), rest, strict=False))
            if scalars.get(TOKENS_FIELD):
                scalars["loss"] /= scalars[TOKENS_FIELD]
            results.append(StepResult(own.step, own.epoch, scalars, own.ended))
        return StepFlags(stop > 0, save > 0, end > 0, news), results

    def _values(self) -> list[torch.Tensor | float]:
        return [each.sums.values[name] for each in self._sent for name in sorted(each.sums.values)]

    def _agreed_names(self) -> list[str]:
        own = [sorted(each.sums.values) for each in self._sent]
        for rank, names in enumerate(told := self._team.gather(own)):
            for step, first, other in zip(self._sent, told[0], names, strict=True):
                if other != first:
                    raise UserError(
                        f"The metrics of step {step.step} are {first} on rank 0, but {other} on rank {rank}. "
                        "Use the same metric names on every rank."
                    )
        if taken := sorted(set(own[-1]).intersection(RESERVED_FIELDS)):
            raise UserError(f"A metric is named {taken[0]!r}, which is reserved in metrics.jsonl. Rename it.")
        return own[-1]


class _Own(NamedTuple):
    """A step of this rank."""

    step: int
    epoch: int
    sums: MetricAccumulator
    ended: TimingSample | None


def _send(
    team: DistributedContext, flags: list[float], scalars: list[torch.Tensor | float]
) -> Callable[[], list[float]]:
    """Start the sum over all ranks; return a function that waits for it."""
    device = team.device
    if device.type == "cpu":
        return start_sum(team, [*flags, *map(float, scalars)])
    values = [torch.as_tensor(scalar, dtype=torch.float64) for scalar in scalars]
    host = torch.tensor(flags, dtype=torch.float64)
    own = torch.cat(
        [host.to(device, non_blocking=True), *(v.reshape(1).to(device, non_blocking=True) for v in values)]
    )
    told, pending = _exchange(team, own, None) if team.is_distributed else (own[None], None)
    # The copy to the host uses its own stream. On the compute stream it would wait for the next step, which
    # is already queued.
    aside = _stream_aside(device)
    aside.wait_stream(torch.cuda.current_stream(device))
    arrived = torch.empty(told.shape, dtype=torch.float64, pin_memory=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(aside):
        if pending is not None:
            pending.wait()
        arrived.copy_(told, non_blocking=True)
        event.record(aside)
    # The memory of `told` must not be reused before the copy is done.
    told.record_stream(aside)

    def read() -> list[float]:
        event.synchronize()
        return _sum(arrived)

    return read


def start_sum(team: DistributedContext, own: list[float]) -> Callable[[], list[float]]:
    """Start the sum of host numbers over all ranks; return a function that waits for it."""
    if not team.is_distributed:
        return lambda: own
    told, pending = _exchange(team, torch.tensor(own, dtype=torch.float64), team.control)

    def read() -> list[float]:
        pending.wait()
        return _sum(told)

    return read


def _exchange(
    team: DistributedContext, own: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, Any]:
    """Start the exchange of numbers.

    The order of additions in an all-reduce depends on a number's position in the message, which is constant
    only with one step per message. Up to `_FEW` ranks gather instead, and each adds in rank order.

    Returns:
        A row per rank, or one row with the sum; and a handle to wait for it.
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
