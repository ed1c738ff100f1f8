"""A rank that stops before the all-reduce: found, named, written down, and started again."""

from __future__ import annotations

from pathlib import Path

import pytest
from e2e_runs import Run
from helpers import assert_no_process_left

SCRIPT = Path(__file__).with_name("hanging.py")


def hang(path: Path, env: dict[str, str], shape: list[str], how: str) -> tuple[Run, dict]:
    """Run the script to its end, and return what was recorded of the hang."""
    run = Run(path, env)
    run.hpctrain("submit", *shape, "--hang-limit", "3", "--run-dir", str(path), str(SCRIPT), how)
    assert run.wait() == 0
    (failure,) = run.events("failure")
    assert failure["class"] == "hang"
    assert sorted(run.losses()) == list(range(1, 9))
    assert_no_process_left(path)
    return run, failure


def test_a_rank_in_an_endless_loop_is_named_with_its_line(tmp_path):
    run, failure = hang(tmp_path / "run", {}, ["--backend", "local", "--tasks-per-node", "2"], "loop")
    assert failure["rank"] == 1
    assert "rank 1 on local-0 is in never_return (hanging.py:" in failure["cause"]
    assert "1 of 2 ranks wait in" in failure["cause"]
    assert "in never_return" in run.dir.stacks(0, 1).read_text()
    assert "in never_return" not in run.dir.stacks(0, 0).read_text()
    assert "Thread" in run.dir.stacks(0, 0).read_text()


@pytest.mark.long
def test_a_rank_that_cannot_answer_prints_where_it_is(tmp_path):
    run, failure = hang(tmp_path / "run", {}, ["--backend", "local", "--tasks-per-node", "2"], "frozen")
    assert failure["rank"] == 1
    assert "rank 1 on local-0 does not answer" in failure["cause"]
    assert "in never_return" in run.dir.rank_log(0, 1).read_text()


@pytest.mark.long
def test_a_hang_on_nodes_of_slurm(slurm, tmp_path):
    _, failure = hang(tmp_path / "run", slurm.env, ["--nodes", "2", "--gpus-per-node", "2"], "sleep")
    assert (failure["rank"], "is in never_return" in failure["cause"]) == (1, True)
