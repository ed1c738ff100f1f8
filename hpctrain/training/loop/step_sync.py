"""Exchange losses, requests to stop and save, and ends of stream shards between the ranks after each step.

The sum is computed during the next step and read at its end, so no step waits. All ranks read the same sum at
the same step, and thus agree on a stop without further messages. Short steps share a message (see
`MessageBatcher`), with bitwise the same results.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.telemetry.accounting.metric_fields import RESERVED_FIELDS
from hpctrain.training.base.metric_accumulator import TOKENS_FIELD, MetricAccumulator, exact_sum
from hpctrain.training.observe.run_writer import StepResult
from hpctrain.training.observe.step_timers import TimingSample
from hpctrain.training.replica_check import NUMBERS_PER_MESSAGE, ReplicaCheck

#: Seconds of work per message, if a message covers more than one item.
_WORK_S = 0.01
#: Maximum items per message; limits the delay of a stop if items suddenly become slower.
_MAX_ITEMS = 16
#: Maximum number of ranks with several steps per message. With more ranks, short steps are rare.
_MAX_GATHER_RANKS = 32
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(frozen=True)
class StepFlags:
    """Requests of a rank, or combined requests of all ranks."""

    stop: bool = False
    save: bool = False
    end: bool = False
    """The training should end with the current steps."""
    stream_ends: float = 0.0
    """Value from the step source, to be summed over all ranks."""
    copy_every: float = 0.0
    """Steps between two copies of the state in memory, as chosen by rank 0; 0 on other ranks."""


class MessageBatcher:
    """Counter of work items. All ranks derive the same message size from the last exchanged duration."""

    def __init__(self, *, one_by_one: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self._max_size, self._clock = 1 if one_by_one else _MAX_ITEMS, clock
        self.size = 1
        self.reset()

    def reset(self) -> None:
        self._count, self._since = 0, self._clock()

    def add(self) -> None:
        self._count += 1

    @property
    def is_full(self) -> bool:
        return self._count >= self.size

    def seconds_per_item(self) -> float:
        """Return this rank's seconds per item since the last call, for the exchange with all ranks."""
        now = self._clock()
        seconds = (now - self._since) / max(self._count, 1)
        self._count, self._since = 0, now
        return seconds

    def adapt(self, seconds: float) -> None:
        """Adapt the message size to `seconds` per item, which must be the same on all ranks."""
        self.size = self._max_size if seconds * self._max_size <= _WORK_S else max(1, int(_WORK_S / seconds))


class StepSync:
    """Exchange of step results and requests."""

    def __init__(
        self, context: DistributedContext, *, one_by_one: bool, replica_check: ReplicaCheck | None = None
    ) -> None:
        self._context, self._replica_check = context, replica_check
        self._batcher = MessageBatcher(one_by_one=one_by_one or context.ranks.world_size > _MAX_GATHER_RANKS)
        self._recorded: list[_RecordedStep] = []
        self._sent: list[_RecordedStep] = []
        self._names: list[str] | None = None
        self._read: Callable[[], list[float]] | None = None
        self._checks_loss = False
        #: Loss of the unfinished step that was sent last.
        self.checked_loss = 0.0

    def begin(self) -> None:
        self._batcher.reset()

    def add(self, step: int, epoch: int, sums: MetricAccumulator, timing: TimingSample | None) -> None:
        self._recorded.append(_RecordedStep(step, epoch, sums, timing))
        self._batcher.add()

    @property
    def is_due(self) -> bool:
        return self._batcher.is_full

    @property
    def is_pending(self) -> bool:
        return self._read is not None

    def discard(self) -> None:
        self._recorded = []

    def own_loss(self, step: int) -> float:
        for record in self._sent:
            if record.step == step:
                loss = record.sums.values.get("loss", 0.0)
                return float(loss.sum()) if isinstance(loss, torch.Tensor) else loss
        return 0.0

    def send(self, requests: StepFlags, unfinished: MetricAccumulator | None = None) -> None:
        """Send the recorded steps, this rank's requests, and the loss of an unfinished step, if given."""
        flags = [*map(float, (requests.stop, requests.save, requests.end))]
        flags += [requests.stream_ends, requests.copy_every]
        flags.append(self._batcher.seconds_per_item())
        self._sent, self._recorded = self._recorded, []
        if self._names is None and self._sent:
            self._names = self._agreed_names()
        # Messages have the same length on all ranks. A rank with other names sends zeros and sets a flag.
        names = dict.fromkeys(self._names or ()).keys()
        names_differ = any(record.sums.values.keys() != names for record in self._sent)
        values = self._values()
        if names_differ:
            values = [torch.zeros(len(names) * r.sums.width, dtype=torch.float64) for r in self._sent]
        self._checks_loss = unfinished is not None
        if unfinished is not None:
            values += [unfinished.values.get(name, 0.0) for name in ("loss", TOKENS_FIELD)]
        if self._replica_check is not None:
            values = [*self._replica_check.message(), *values]
        self._read = _send(self._context, [*flags, float(names_differ)], values)

    def read(self) -> tuple[StepFlags, list[StepResult]]:
        """Wait for the sum over all ranks, which was started a step earlier."""
        if self._read is None:
            raise RuntimeError("nothing was sent")
        stop, save, end, stream_ends, copy_every, seconds, names_differ, *values = self._read()
        self._read = None
        if self._replica_check is not None:
            self._replica_check.verify(values[:NUMBERS_PER_MESSAGE])
            values = values[NUMBERS_PER_MESSAGE:]
        if self._checks_loss:
            *values, loss, tokens = values
            self.checked_loss = loss / (tokens or 1.0)
        self._batcher.adapt(seconds / self._context.ranks.world_size)
        if names_differ:
            self._names = self._agreed_names()
            values = _send(self._context, [], self._values())()
        results, numbers = [], iter(values)
        for record in self._sent:
            # The names are the first argument, so that zip does not consume an extra value of `numbers`.
            names, width = sorted(record.sums.values), record.sums.width
            if width == 1:
                scalars = dict(zip(names, numbers, strict=False))
            else:
                scalars = {name: exact_sum(islice(numbers, width)) for name in names}
            if scalars.get(TOKENS_FIELD):
                scalars["loss"] /= scalars[TOKENS_FIELD]
            results.append(StepResult(record.step, record.epoch, scalars, record.ended))
        return StepFlags(stop > 0, save > 0, end > 0, stream_ends, copy_every), results

    def _values(self) -> list[torch.Tensor | float]:
        return [record.sums.values[name] for record in self._sent for name in sorted(record.sums.values)]

    def _agreed_names(self) -> list[str]:
        rank_names = [sorted(record.sums.values) for record in self._sent]
        gathered = self._context.all_gather(rank_names)
        for rank, names_of_steps in enumerate(gathered):
            for record, expected, names in zip(self._sent, gathered[0], names_of_steps, strict=True):
                if names != expected:
                    raise UserError(
                        f"The metrics of step {record.step} are {expected} on rank 0, but {names} on rank "
                        f"{rank}. Use the same metric names on every rank."
                    )
        if taken := sorted(set(rank_names[-1]).intersection(RESERVED_FIELDS)):
            raise UserError(
                f"A metric is named {taken[0]!r}, which is reserved in metrics.jsonl. Rename the metric."
            )
        return rank_names[-1]


class _RecordedStep(NamedTuple):
    """A step of this rank."""

    step: int
    epoch: int
    sums: MetricAccumulator
    ended: TimingSample | None


def _send(
    context: DistributedContext, flags: list[float], scalars: list[torch.Tensor | float]
) -> Callable[[], list[float]]:
    """Start the sum over all ranks; return a function that waits for the result."""
    device = context.device
    if device.type == "cpu":
        for scalar in scalars:
            flags += scalar.reshape(-1).tolist() if isinstance(scalar, torch.Tensor) else [scalar]
        return start_sum(context, flags)
    values = [torch.tensor(flags, dtype=torch.float64)]
    values += [torch.as_tensor(scalar, dtype=torch.float64).reshape(-1) for scalar in scalars]
    message = torch.cat([value.to(device, non_blocking=True) for value in values])
    gathered, pending = _exchange(context, message, None) if context.is_distributed else (message[None], None)
    # The copy to the host uses its own stream. On the compute stream it would wait for the next step, which
    # is already queued.
    if device not in _STREAMS:
        _STREAMS[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    copy_stream = _STREAMS[device]
    copy_stream.wait_stream(torch.cuda.current_stream(device))
    arrived = torch.empty(gathered.shape, dtype=torch.float64, pin_memory=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(copy_stream):
        if pending is not None:
            pending.wait()
        arrived.copy_(gathered, non_blocking=True)
        event.record(copy_stream)
    # The memory of `gathered` must not be reused before the copy is done.
    gathered.record_stream(copy_stream)

    def read() -> list[float]:
        event.synchronize()
        return _sum_rows(arrived)

    return read


def start_sum(context: DistributedContext, values: list[float]) -> Callable[[], list[float]]:
    """Start the sum of host numbers over all ranks; return a function that waits for the result."""
    if not context.is_distributed:
        return lambda: [value + 0.0 for value in values]  # -0.0 becomes 0.0, as in a sum over ranks
    gathered, pending = _exchange(context, torch.tensor(values, dtype=torch.float64), context.cpu_group)

    def read() -> list[float]:
        pending.wait()
        return _sum_rows(gathered)

    return read


def _exchange(
    context: DistributedContext, message: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, Any]:
    """Start the exchange of numbers; return a row per rank, or one row with the sum, and a handle.

    The order of additions in an all-reduce depends on a number's position in the message, which is constant
    only with one step per message. Up to `_MAX_GATHER_RANKS` ranks use a gather instead, and each rank adds
    in rank order.
    """
    if context.ranks.world_size > _MAX_GATHER_RANKS:
        return message[None], dist.all_reduce(message, group=group, async_op=True)
    gathered = message.new_empty((context.ranks.world_size, len(message)))
    return gathered, dist.all_gather(list(gathered), message, group=group, async_op=True)


def _sum_rows(rows: torch.Tensor) -> list[float]:
    return [sum(column) for column in zip(*rows.tolist(), strict=True)]
