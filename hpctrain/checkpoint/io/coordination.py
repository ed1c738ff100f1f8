"""Exchange messages between the ranks that save together.

A separate process group is used: saves run in the background, and their messages must not mix with those of
training. Every wait has a limit. After the loss of a rank, all communication fails immediately.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpctrain.checkpoint.io import messages
from hpctrain.errors import CheckpointError, DiskFull, RendezvousError

T = TypeVar("T")

#: Maximum size of a message between two ranks.
_PART_BYTES = 64 * 2**20

#: Start of the message of an OSError caused by a full disk or a quota.
_FULL = re.compile(rf"\[Errno (?:{errno.ENOSPC}|{errno.EDQUOT})\]")


class PeerLost(CheckpointError):
    """Error for a lost rank: saving is impossible until all ranks are restarted."""


class SaveAborted(CheckpointError): ...


class RankCoordinator:
    """All ranks, which save together, as seen by one rank; all methods are collective."""

    def __init__(self, is_distributed: bool, limit_s: float) -> None:
        """Create a group; `limit_s` is the longest time that a rank may block the others."""
        self.rank = dist.get_rank() if is_distributed else 0
        self.world_size = dist.get_world_size() if is_distributed else 1
        self.limit_s = limit_s
        self.lost_reason: str | None = None
        """Reason for the loss of communication; None while the ranks can communicate."""
        self._group: dist.ProcessGroup | None = None
        if is_distributed:
            self._group = dist.new_group(timeout=timedelta(seconds=limit_s), backend="gloo")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def broadcast(self, value: T, waiting_for: str) -> T:
        box = [value]

        def exchange(group: dist.ProcessGroup) -> None:
            box[0] = messages.broadcast(group, value, src=0)

        self._communicate(waiting_for, exchange)
        return box[0]

    def all_gather(self, value: T, waiting_for: str, *, to: int | None = None) -> list[T]:
        """Return the values of all ranks; with `to`, the result on other ranks is meaningless."""
        values = [value] * self.world_size

        def exchange(group: dist.ProcessGroup) -> None:
            values[:] = messages.gather(group, value, to=to)

        self._communicate(waiting_for, exchange)
        return values

    def exchange(
        self,
        outgoing: torch.Tensor,
        target: int | None,
        incoming: Mapping[int, torch.Tensor],
        waiting_for: str,
    ) -> None:
        """Send a tensor to `target`, and receive tensors of known sizes, by sending rank."""
        sizes = [len(outgoing), *map(len, incoming.values())]

        def transfer(group: dist.ProcessGroup) -> None:
            # The time limit applies to each message.
            for start in range(0, max(sizes), _PART_BYTES):
                block = slice(start, start + _PART_BYTES)
                pending: list[Any] = [
                    dist.irecv(tensor[block], source, group)
                    for source, tensor in incoming.items()
                    if len(tensor[block])
                ]
                if target is not None and len(outgoing[block]):
                    pending.append(dist.isend(outgoing[block], target, group))
                for work in pending:
                    work.wait()

        self._communicate(waiting_for, transfer)

    def count_flags(self, *flags: bool, waiting_for: str) -> list[int]:
        """Return, for each flag, the number of ranks on which it is set."""
        numbers = torch.tensor(flags, dtype=torch.int32)
        self._communicate(waiting_for, lambda group: dist.all_reduce(numbers, group=group))
        return [int(number) for number in numbers]

    def run_on_all(self, action: Callable[[], T], failure: str) -> T:
        """Run `action` on every rank; if it raises on any rank, raise CheckpointError on all."""
        result: Any = None
        problem: str | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 (reported to and raised on all ranks)
            problem = describe_exception(error)
        self.raise_on_all(problem, failure)
        return result  # type: ignore[no-any-return]

    def raise_on_all(self, problem: str | None, failure: str) -> None:
        """Raise CheckpointError, or DiskFull, on all ranks if any rank has a problem."""
        for rank, text in enumerate(self.all_gather(problem, failure)):
            if text:
                kind = DiskFull if _FULL.search(text) else CheckpointError
                raise kind(f"{failure}: {text}" + f" (rank {rank})" * (self.world_size > 1))

    def _communicate(self, waiting_for: str, exchange: Callable[[dist.ProcessGroup], Any]) -> None:
        if self._group is None:
            return
        if self.lost_reason:
            raise PeerLost(self.lost_reason)
        try:
            exchange(self._group)
        except (RuntimeError, ValueError, dist.DistError, RendezvousError) as error:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            self.lost_reason = (
                f"the ranks lost their connection during a checkpoint operation with a time limit of "
                f"{self.limit_s:g} s ({waiting_for}): {cause}. Saving is impossible until the ranks are "
                "restarted."
            )
            raise PeerLost(self.lost_reason) from error


def describe_exception(error: BaseException) -> str:
    """Return an exception as one line, without the type name for CheckpointErrors."""
    text, name = str(error).partition("\n")[0], type(error).__name__
    if isinstance(error, CheckpointError):
        return text
    return f"{name}: {text}" if text else name
