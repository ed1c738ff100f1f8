"""Sum numbers over the ranks in the background, in messages about several steps if these are short."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hpctrain.runtime.distributed_context import DistributedContext

#: Seconds of work per message, if a message covers more than one item.
_WORK_S = 0.01
#: Maximum items per message; limits the delay of a stop if items suddenly become slower.
_MAX_ITEMS = 16
#: Maximum number of ranks with several steps per message. With more ranks, short steps are rare.
MAX_GATHER_RANKS = 32
_STREAMS: dict[torch.device, torch.cuda.Stream] = {}


class MessageBatcher:
    """Counter of work items. All ranks derive the same message size from the last exchanged duration."""

    def __init__(self, *, one_by_one: bool = False) -> None:
        self._max_size, self.size = 1 if one_by_one else _MAX_ITEMS, 1
        self.reset()

    def reset(self) -> None:
        self._count, self._since = 0, time.perf_counter()

    def add(self) -> None:
        self._count += 1

    @property
    def is_full(self) -> bool:
        return self._count >= self.size

    def seconds_per_item(self) -> float:
        """Return this rank's seconds per item since the last call, for the exchange with all ranks."""
        seconds = (time.perf_counter() - self._since) / max(self._count, 1)
        self.reset()
        return seconds

    def adapt(self, seconds: float) -> None:
        """Adapt the message size to `seconds` per item, which must be the same on all ranks."""
        self.size = self._max_size if seconds * self._max_size <= _WORK_S else max(1, int(_WORK_S / seconds))


def send_sum(
    context: DistributedContext, flags: list[float], scalars: list[torch.Tensor | float]
) -> Callable[[], list[float]]:
    """Start the sum of flags and metrics over all ranks; return a function that waits for the result."""
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
    only with one step per message. Up to `MAX_GATHER_RANKS` ranks use a gather instead, and each rank adds
    in rank order.
    """
    if context.ranks.world_size > MAX_GATHER_RANKS:
        return message[None], dist.all_reduce(message, group=group, async_op=True)
    gathered = message.new_empty((context.ranks.world_size, len(message)))
    return gathered, dist.all_gather(list(gathered), message, group=group, async_op=True)


def _sum_rows(rows: torch.Tensor) -> list[float]:
    return [sum(column) for column in zip(*rows.tolist(), strict=True)]
