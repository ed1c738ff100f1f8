"""A training whose module and optimizer are cut over the ranks, saved and gone on with on other ranks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from helpers.fork_server import run_forked

SCRIPT = Path(__file__).with_name("fsdp_on_ranks.py")


def train(folder: Path, last_step: int, ranks: int) -> list[float]:
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    printed = run_forked(SCRIPT, [str(folder), str(last_step)], env, ranks=ranks)
    return ast.literal_eval(printed.splitlines()[-1])


@pytest.mark.parametrize("ranks", [(2, 1, 2), (1, 2, 2), (2, 3, 1)])
def test_2_1_2_ranks_train_what_one_trains(tmp_path, ranks):
    whole = train(tmp_path / "whole", 9, 1)
    for last_step, world_size in zip((3, 6, 9), ranks, strict=True):
        parts = train(tmp_path / "parts", last_step, world_size)
    assert parts == pytest.approx(whole, rel=1e-9)
