"""`run_on_ranks`: results, and failures on a rank with their traceback."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_on_ranks

pytestmark = pytest.mark.ranks


def add_ranks(base: int) -> tuple[int, float, torch.Tensor]:
    total = torch.tensor(float(base + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), torch.full((2,), dist.get_rank())


def compare_on_rank_1(other: int) -> None:
    print("begins")
    dist.barrier()
    if dist.get_rank() == 1:
        numbers = [1, 2]
        assert numbers == [1, other]
    dist.barrier()


def test_each_rank_returns_its_value():
    results = run_on_ranks(add_ranks, 10, world_size=3)
    assert [result[:2] for result in results] == [(0, 33.0), (1, 33.0), (2, 33.0)]
    assert [result[2].tolist() for result in results] == [[0, 0], [1, 1], [2, 2]]


def test_failed_assertion_of_a_rank_shows_its_values():
    run_on_ranks(compare_on_rank_1, 2)
    with pytest.raises(AssertionError, match=r"rank 1 of 2 failed") as error:
        run_on_ranks(compare_on_rank_1, 3)
    text = str(error.value)
    assert "assert [1, 2] == [1, 3]" in text
    assert "assert numbers == [1, other]" in text
    assert text.count("begins") == 2
