"""What `hpctrain chaos` chooses, and which runs it leaves alone."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest
from helpers import run_command

from hpctrain.errors import SpecError
from hpctrain.jobs.chaos import Fault, check_run, choose, faults_for
from hpctrain.jobs.runs import Run
from hpctrain.rundir import RunDir

STARTED = {"attempt": 3, "world_size": 6, "hosts": ["n1", "n2", "n5"]}


def test_ranks_and_their_nodes_are_chosen_evenly():
    chance = random.Random(1)
    blows = [choose([Fault.KILL_RANK], STARTED, chance) for _ in range(600)]
    counts = Counter((blow.ranks, blow.host) for blow in blows)
    assert set(counts) == {((rank,), STARTED["hosts"][rank // 2]) for rank in range(6)}
    assert min(counts.values()) > 60


def test_all_ranks_of_a_node_are_struck_together():
    blows = {choose([Fault.KILL_NODE_RANKS], STARTED, random.Random(seed)) for seed in range(50)}
    assert {(blow.ranks, blow.host) for blow in blows} == {((0, 1), "n1"), ((2, 3), "n2"), ((4, 5), "n5")}
    assert "kill-node-ranks: ranks 2 to 3 on n2" in map(str, blows)


def test_without_slurm_nothing_is_done_after_which_nobody_starts_the_run_again():
    assert faults_for("local", []) == (Fault.KILL_RANK, Fault.KILL_NODE_RANKS, Fault.PREEMPT)
    with pytest.raises(SpecError, match=r"--fault kill-supervisor needs Slurm, .* backend is local"):
        faults_for("local", [Fault.KILL_SUPERVISOR, Fault.KILL_RANK])
    assert Fault.REQUEUE in faults_for("slurm", [])
    assert faults_for("slurm", [Fault.STOP_RANK]) == (Fault.STOP_RANK,)


def test_runs_of_others_and_runs_that_do_not_run_are_left_alone(tmp_path, monkeypatch):
    run = Run(RunDir(tmp_path), {})
    with pytest.raises(SpecError, match="is UNKNOWN; only a running one can be disturbed"):
        check_run(run)
    (tmp_path / "task-4").mkdir()
    with pytest.raises(SpecError, match=r"is a job array: name one of its tasks, as in .*/task-4"):
        check_run(run)
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SpecError, match="belongs to user"):
        check_run(run)


def test_the_command_knows_its_faults():
    command = [sys.executable, "-m", "hpctrain", "chaos", "no-run", "--fault", "flood"]
    done = run_command(command, check=False)
    assert done.returncode == 2
    assert "--fault flood: there are kill-rank, kill-node-ranks, stop-rank" in done.stderr
