"""Faults that `hpctrain chaos` chooses, and runs that it does not touch."""

import itertools
import random
from types import SimpleNamespace

import pytest
from helpers.run_histories import event

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.runs import chaos
from hpctrain.jobs.runs.chaos import ChaosRunner, Fault, check_disturbable, choose_fault, faults_for
from hpctrain.jobs.runs.run import Run
from hpctrain.rundir import RunDir
from hpctrain.slurm.states import RunState

STARTED = event("started", attempt=3, world_size=6, hosts=["n1", "n2", "n5"])


def test_all_ranks_of_a_node_are_killed_together():
    faults = {choose_fault([Fault.KILL_NODE_RANKS], STARTED, random.Random(seed)) for seed in range(50)}
    assert {(fault.ranks, fault.host) for fault in faults} == {((0, 1), "n1"), ((2, 3), "n2"), ((4, 5), "n5")}
    assert "kill-node-ranks: ranks 2-3 on n2" in map(str, faults)


def test_local_backend_excludes_faults_without_restart():
    assert faults_for("local", []) == (Fault.KILL_RANK, Fault.KILL_NODE_RANKS, Fault.PREEMPT)
    with pytest.raises(SpecError, match=r"--fault kill-supervisor requires Slurm, .* uses the local backend"):
        faults_for("local", [Fault.KILL_SUPERVISOR, Fault.KILL_RANK])
    assert Fault.REQUEUE in faults_for("slurm", [])
    assert faults_for("slurm", [Fault.STOP_RANK]) == (Fault.STOP_RANK,)


def test_batch_script_excludes_faults_of_ranks():
    faults = (Fault.KILL_SUPERVISOR, Fault.PREEMPT, Fault.REQUEUE)
    assert faults_for("slurm", [], is_batch=True) == faults
    with pytest.raises(
        SpecError, match="--fault kill-rank signals ranks that hpctrain starts, but the batch"
    ):
        faults_for("slurm", [Fault.KILL_RANK], is_batch=True)


def test_runs_of_others_and_inactive_runs_are_refused(tmp_path, monkeypatch):
    run = Run(RunDir(tmp_path), {})
    with pytest.raises(SpecError, match=r"is UNKNOWN\. Only a run that is RUNNING can be disturbed"):
        check_disturbable(run)
    (tmp_path / "task-4").mkdir()
    with pytest.raises(SpecError, match=r"is a job array. Specify a task, such as .*/task-4"):
        check_disturbable(run)
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(SpecError, match="belongs to user"):
        check_disturbable(run)


class FakeRun(Run):
    """A run with given states, one per poll."""

    def watch(self):
        yield from self.environ["looks"]


def statuses(*states: str) -> list[SimpleNamespace]:
    return [
        SimpleNamespace(state=RunState(state), attempt=3, backend="local", job_id="1") for state in states
    ]


def test_unreachable_run_is_abandoned_but_pending_one_is_not(tmp_path, monkeypatch):
    clock = itertools.count(0.0, 100.0)
    monkeypatch.setattr(chaos.time, "monotonic", lambda: next(clock))
    run = FakeRun(
        RunDir(tmp_path), {"looks": statuses("RUNNING", "PENDING", "RUNNING", "PENDING", "COMPLETED")}
    )
    assert ChaosRunner(run, (Fault.KILL_RANK,), 1, print).inject_faults(2, 1.0) == 0
    run = FakeRun(RunDir(tmp_path), {"looks": statuses(*["UNKNOWN"] * 9)})
    with pytest.raises(SchedulerError, match="is UNKNOWN, but no fault could be injected within 120 s"):
        ChaosRunner(run, (Fault.KILL_RANK,), 1, print).inject_faults(2, 1.0)


def test_same_seed_injects_the_same_faults(tmp_path):
    run = FakeRun(RunDir(tmp_path), {"looks": statuses(*["RUNNING"] * 5)})
    run.dir.log_event("submitted", 0, job_id="1", backend="local")
    run.dir.log_event("started", 3, world_size=6, hosts=["n1", "n2", "n5"])
    outputs: list[list[str]] = [[], []]
    for lines in outputs:
        assert (
            ChaosRunner(run, faults_for("local", []), 7, lines.append).inject_faults(4, 60.0, dry_run=True)
            == 4
        )
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 4
