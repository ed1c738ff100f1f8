"""Messages between the ranks that save together."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_on_ranks

from hpctrain.checkpoint.io import coordination
from hpctrain.checkpoint.io.coordination import RankCoordinator
from hpctrain.checkpoint.io.loading import check_on_all
from hpctrain.errors import CheckpointError

pytestmark = pytest.mark.ranks

SIZES = (0, 1, 25)


def exchange_in_small_parts() -> list[bytes]:
    coordination._PART_BYTES = 10
    rank = dist.get_rank()
    source, coordinator = (rank - 1) % 3, RankCoordinator(True, 20.0)
    received = torch.empty(SIZES[source], dtype=torch.uint8)
    content = torch.full((SIZES[rank],), rank, dtype=torch.uint8)
    coordinator.exchange(content, (rank + 1) % 3, {source: received}, "copies")
    return [received.numpy().tobytes()]


def test_contents_of_different_sizes_are_exchanged_in_parts():
    received = run_on_ranks(exchange_in_small_parts, world_size=3)
    assert received == [[bytes([2]) * 25], [b""], [bytes([1])]]


def check_longer_than_the_limit(progress: bool) -> str:
    coordinator = RankCoordinator(True, 1.0)

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
