"""`run_on_ranks`: results, and failures on a rank with their traceback."""

from __future__ import annotations

import os
import signal
from pathlib import Path

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


def wait_for_each_other_forever(folder: Path) -> None:
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def end_on_rank_1(mode: str) -> int:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL) if mode == "kill" else os._exit(0)
    return 7


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


def test_late_ranks_are_killed(tmp_path):
    with pytest.raises(AssertionError, match=r"no end after 1 s of ranks \[0, 1\]") as error:
        run_on_ranks(wait_for_each_other_forever, tmp_path, timeout=1)
    assert "in wait_for_each_other_forever" in str(error.value)  # the stack of rank 1
    for rank in "01":
        assert not Path("/proc", (tmp_path / rank).read_text()).exists()


def test_rank_that_ends_early_fails_the_test_unless_expected():
    with pytest.raises(AssertionError, match="rank 1 of 2 ended with exit code 0 before it returned"):
        run_on_ranks(end_on_rank_1, "exit")
    with pytest.raises(AssertionError, match="rank 1 of 2 ended with exit code -9 before it returned"):
        run_on_ranks(end_on_rank_1, "kill")
    assert run_on_ranks(end_on_rank_1, "kill", killed=[1]) == [7, None]
