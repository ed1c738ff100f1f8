"""Messages between the ranks that save together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_on_ranks

from hpctrain.checkpoint.io import coordination
from hpctrain.checkpoint.io.coordination import PeerLost, RankCoordinator
from hpctrain.errors import CheckpointError

pytestmark = pytest.mark.ranks

SIZES = (0, 1, 25)


def exchange_in_small_parts() -> list[bytes]:
    coordination._PART_BYTES = 10
    rank = dist.get_rank()
    content = bytes([rank]) * SIZES[rank]
    coordinator = RankCoordinator(dist.group.WORLD, 20.0)
    received = coordinator.exchange(memoryview(content), (rank + 1) % 3, [(rank - 1) % 3], "copies")
    return [bytes(part) for part in received]


def test_contents_of_different_sizes_are_exchanged_in_parts():
    received = run_on_ranks(exchange_in_small_parts, world_size=3)
    assert received == [[bytes([2]) * 25], [b""], [bytes([1])]]


def exchange_without_memory_on_rank_1() -> list[str]:
    rank = dist.get_rank()
    coordinator = RankCoordinator(dist.group.WORLD, 20.0)
    allocate, torch.empty = torch.empty, fail if rank == 1 else torch.empty
    with pytest.raises(CheckpointError) as error:
        coordinator.exchange(memoryview(b"1"), 1 - rank, [1 - rank], "copies")
    torch.empty = allocate
    assert not isinstance(error.value, PeerLost)
    return [
        str(error.value),
        *map(bytes, coordinator.exchange(memoryview(b"2"), 1 - rank, [1 - rank], "copies")),
    ]


def fail(*_sizes: object, **_options: object) -> torch.Tensor:
    raise MemoryError("no space")


def test_rank_without_memory_fails_the_exchange_on_all_ranks_but_not_the_next_one():
    results = run_on_ranks(exchange_without_memory_on_rank_1)
    assert results == [["no memory for copies: MemoryError: no space (rank 1)", b"2"]] * 2
