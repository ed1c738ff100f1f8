"""What the ranks that save together tell each other.

They do so over a group of their own: saving goes on in the background, and messages of training and of
saving in one group would be taken for each other. Every wait has a limit. A rank that is gone ends the
agreement at once and for good; the saves after it fail without waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hpctrain.errors import CheckpointError

T = TypeVar("T")


class LostTouch(CheckpointError):
    """A rank no longer answers, so no checkpoint can be agreed upon until the ranks are started again."""


class Agreement:
    """The ranks that save together, seen from one of them. Every method but `alone` is a collective."""

    def __init__(self, group: dist.ProcessGroup | None, limit_s: float) -> None:
        """Make a group of the same ranks as `group`; None is a single process.

        Args:
            group: all ranks.
            limit_s: how long one rank may keep the others waiting, in seconds.
        """
        self.rank = dist.get_rank(group) if group is not None else 0
        self.world_size = dist.get_world_size(group) if group is not None else 1
        self._limit_s = limit_s
        self._lost: str | None = None
        self._members = [0] if group is None else dist.get_process_group_ranks(group)
        self._group = (
            None
            if group is None
            else dist.new_group(self._members, timeout=timedelta(seconds=limit_s), backend="gloo")
        )

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def lost(self) -> str | None:
        """Why this rank can agree on nothing any more; None where it still can."""
        return self._lost

    def rank_of(self, global_rank: int) -> int:
        """The number among the ranks that save of the process with that rank of all."""
        return self._members.index(global_rank)

    def from_main(self, value: T, waiting_for: str) -> T:
        """Rank 0's `value`."""
        box = [value]
        self._communicate(
            waiting_for,
            lambda group: dist.broadcast_object_list(box, src=self._members[0], group=group),
        )
        return box[0]

    def all(self, value: T, waiting_for: str) -> list[T]:
        """The values of all ranks."""
        values: list[Any] = [value] * self.world_size
        self._communicate(waiting_for, lambda group: dist.all_gather_object(values, value, group=group))
        return values

    def on_main(self, value: T, waiting_for: str) -> list[T]:
        """The values of all ranks on rank 0; on the others nothing that counts."""
        values: list[Any] = [value] * self.world_size
        into = values if self.is_main else None
        self._communicate(
            waiting_for,
            lambda group: dist.gather_object(value, into, dst=self._members[0], group=group),
        )
        return values

    def counts(self, *flags: bool, waiting_for: str) -> list[int]:
        """For each flag, on how many ranks it is set."""
        numbers = torch.tensor(flags, dtype=torch.int32)
        self._communicate(waiting_for, lambda group: dist.all_reduce(numbers, group=group))
        return [int(number) for number in numbers]

    def together(self, action: Callable[[], T], failure: str) -> T:
        """Do `action` on every rank, and give its result; where it raises on any rank, raise on all alike.

        Args:
            action: what this rank does.
            failure: what it means where it fails, as the beginning of a sentence.

        Raises:
            CheckpointError: with the cause on the first rank that has one.
        """
        result: Any = None
        problem: str | None = None
        try:
            result = action()
        except Exception as error:  # noqa: BLE001 (all ranks are told, and raise alike)
            problem = reason(error)
        self.raise_alike(problem, failure)
        return result  # type: ignore[no-any-return]

    def raise_alike(self, problem: str | None, failure: str) -> None:
        """Raise on all ranks where any has a problem.

        Raises:
            CheckpointError: as `together`.
        """
        for rank, text in enumerate(self.all(problem, failure)):
            if text:
                raise CheckpointError(f"{failure}: {text}{self._whose(rank)}")

    def _whose(self, rank: int) -> str:
        return f" (rank {rank})" if self.world_size > 1 else ""

    def _communicate(self, waiting_for: str, exchange: Callable[[dist.ProcessGroup], Any]) -> None:
        if self._group is None:
            return
        if self._lost:
            raise LostTouch(self._lost)
        try:
            exchange(self._group)
        except (RuntimeError, ValueError, dist.DistError) as error:
            cause = str(error).splitlines()[0] if str(error) else type(error).__name__
            self._lost = (
                f"the ranks that save have lost touch with one another (limit {self._limit_s:g} s; at: "
                f"{waiting_for}): {cause}. Nothing can be saved before the ranks are started again."
            )
            raise LostTouch(self._lost) from error


def reason(error: BaseException) -> str:
    """An exception in one line; ours say all themselves."""
    text = str(error).splitlines()[0] if str(error) else ""
    return text if isinstance(error, CheckpointError) else f"{type(error).__name__}: {text}"
