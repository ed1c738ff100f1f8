"""What `hpctrain chaos` chooses, and which runs it leaves alone."""

from __future__ import annotations

import itertools
import random
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
from helpers.commands import run_command

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.runs import chaos
from hpctrain.jobs.runs.chaos import ChaosRunner, Fault, check_disturbable, choose_fault, faults_for
from hpctrain.jobs.runs.run import Run
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import RunState

STARTED = {"attempt": 3, "world_size": 6, "hosts": ["n1", "n2", "n5"]}


def test_ranks_and_their_nodes_are_chosen_evenly():
    chance = random.Random(1)
    blows = [choose_fault([Fault.KILL_RANK], STARTED, chance) for _ in range(600)]
    counts = Counter((blow.ranks, blow.host) for blow in blows)
    assert set(counts) == {((rank,), STARTED["hosts"][rank // 2]) for rank in range(6)}
    assert min(counts.values()) > 60


def test_all_ranks_of_a_node_are_struck_together():
    blows = {choose_fault([Fault.KILL_NODE_RANKS], STARTED, random.Random(seed)) for seed in range(50)}
    assert {(blow.ranks, blow.host) for blow in blows} == {((0, 1), "n1"), ((2, 3), "n2"), ((4, 5), "n5")}
    assert "kill-node-ranks: ranks 2-3 on n2" in map(str, blows)


def test_without_slurm_nothing_is_done_after_which_nobody_starts_the_run_again():
    assert faults_for("local", []) == (Fault.KILL_RANK, Fault.KILL_NODE_RANKS, Fault.PREEMPT)
    with pytest.raises(
        SpecError, match=r"--fault kill-supervisor needs Slurm, .* backend of this run is local"
    ):
        faults_for("local", [Fault.KILL_SUPERVISOR, Fault.KILL_RANK])
    assert Fault.REQUEUE in faults_for("slurm", [])
    assert faults_for("slurm", [Fault.STOP_RANK]) == (Fault.STOP_RANK,)


def test_runs_of_others_and_runs_that_do_not_run_are_left_alone(tmp_path, monkeypatch):
    run = Run(RunDir(tmp_path), {})
    with pytest.raises(SpecError, match="is UNKNOWN; faults can only be injected into a running run"):
        check_disturbable(run)
    (tmp_path / "task-4").mkdir()
    with pytest.raises(SpecError, match=r"is a job array. Name a task, such as .*/task-4"):
        check_disturbable(run)
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SpecError, match="belongs to user"):
        check_disturbable(run)


def test_the_command_knows_its_faults():
    command = [sys.executable, "-m", "hpctrain", "chaos", "no-run", "--fault", "flood"]
    done = run_command(command, check=False)
    assert done.returncode == 2
    assert "--fault flood. Known: kill-rank, kill-node-ranks, stop-rank" in done.stderr


class PretendedRun(Run):
    """A run that stands so or so, one look after the other."""

    def watch(self):
        yield from self.environ["looks"]


def looks(*states: str) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(state=RunState(state), attempt=3, backend="local", job_id="1") for state in states
    ]


def test_a_pretended_run_that_cannot_be_reached_is_given_up_and_one_that_waits_in_the_queue_is_not(
    tmp_path, monkeypatch
):
    clock = itertools.count(0.0, 100.0)
    monkeypatch.setattr(chaos.time, "monotonic", lambda: next(clock))
    run = PretendedRun(
        RunDir(tmp_path), {"looks": looks("RUNNING", "PENDING", "RUNNING", "PENDING", "COMPLETED")}
    )
    assert ChaosRunner(run, (Fault.KILL_RANK,), 1, print).inject_faults(2, 1.0) == 0
    run = PretendedRun(RunDir(tmp_path), {"looks": looks(*["UNKNOWN"] * 9)})
    with pytest.raises(SchedulerError, match="is UNKNOWN, but no fault could be injected for 120 s"):
        ChaosRunner(run, (Fault.KILL_RANK,), 1, print).inject_faults(2, 1.0)


def test_a_pretended_run_meets_the_same_faults_with_the_same_seed(tmp_path):
    run = PretendedRun(RunDir(tmp_path), {"looks": looks(*["RUNNING"] * 5)})
    run.dir.log_event("submitted", 0, job_id="1", backend="local")
    run.dir.log_event("started", 3, world_size=6, hosts=["n1", "n2", "n5"])
    told: list[list[str]] = [[], []]
    for lines in told:
        assert (
            ChaosRunner(run, faults_for("local", []), 7, lines.append).inject_faults(4, 60.0, dry_run=True)
            == 4
        )
    assert told[0] == told[1]
    assert len(told[0]) == 4
