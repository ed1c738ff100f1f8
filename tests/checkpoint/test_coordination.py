"""Messages between the ranks that save together."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_on_ranks

from hpctrain.checkpoint.io import coordination
from hpctrain.checkpoint.io.coordination import PeerLost, RankCoordinator, SaveAborted
from hpctrain.checkpoint.io.loading import check_on_all
from hpctrain.errors import CheckpointError

pytestmark = pytest.mark.ranks

SIZES = (0, 1, 25)


def exchange_in_small_parts() -> list[bytes]:
    coordination._PART_BYTES = 10
    rank = dist.get_rank()
    content = bytes([rank]) * SIZES[rank]
    coordinator = RankCoordinator(dist.group.WORLD, 20.0)
    received = coordinator.exchange(
        memoryview(content), (rank + 1) % 3, [(rank - 1) % 3], "copies", threading.Event()
    )
    return [bytes(part) for part in received]


def test_contents_of_different_sizes_are_exchanged_in_parts():
    received = run_on_ranks(exchange_in_small_parts, world_size=3)
    assert received == [[bytes([2]) * 25], [b""], [bytes([1])]]


def exchange_with_neighbor(content: bytes, abort: threading.Event) -> bytes:
    other = 1 - dist.get_rank()
    coordinator = RankCoordinator(dist.group.WORLD, 20.0)
    (received,) = coordinator.exchange(memoryview(content), other, [other], "copies", abort)
    return bytes(received)


def exchange_without_memory_on_rank_1() -> list[Any]:
    allocate, torch.empty = torch.empty, fail if dist.get_rank() == 1 else torch.empty
    with pytest.raises(CheckpointError) as error:
        exchange_with_neighbor(b"1", threading.Event())
    torch.empty = allocate
    assert not isinstance(error.value, PeerLost)
    return [str(error.value), exchange_with_neighbor(b"2", threading.Event())]


def fail(*_sizes: object, **_options: object) -> torch.Tensor:
    raise MemoryError("no space")


def test_rank_without_memory_fails_the_exchange_on_all_ranks_but_not_the_next_one():
    results = run_on_ranks(exchange_without_memory_on_rank_1)
    assert results == [["no memory for copies: MemoryError: no space (rank 1)", b"2"]] * 2


def abort_exchange_on_rank_1() -> None:
    coordination._PART_BYTES, abort = 10, threading.Event()
    if dist.get_rank() == 1:
        abort.set()
    with pytest.raises(SaveAborted):
        exchange_with_neighbor(bytes(25), abort)


def test_abort_on_one_rank_ends_the_exchange_on_all():
    run_on_ranks(abort_exchange_on_rank_1)


def check_longer_than_the_limit(progress: bool) -> str:
    coordinator = RankCoordinator(dist.group.WORLD, 1.0)

    def check(on_read: Any) -> str:
        for _ in range(10 if dist.get_rank() == 1 else 0):
            time.sleep(0.25)
            if progress:
                on_read()
        return "checked"

    try:
        return check_on_all(coordinator, check)
    except CheckpointError as error:
        return str(error)


def test_ranks_wait_for_a_long_check_as_long_as_its_disk_makes_progress():
    assert run_on_ranks(check_longer_than_the_limit, True) == ["checked"] * 2
    assert run_on_ranks(check_longer_than_the_limit, False) == ["the disk has not made progress for 1 s"] * 2
