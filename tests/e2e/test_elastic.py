"""Runs with MIN:MAX nodes: they start on the free nodes and continue on those that are left."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.training_runs import JOB, RUN_LIMIT_S, Run, assert_same_training
from helpers.waiting import wait_for

SHAPE = ["--nodes", "2:4", "--gpus-per-node", "2"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


def submit(path: Path, env: Mapping[str, str], shape: list[str], *, step_s: float) -> Run:
    """Submit `train_classifier.py` without dropout, whose random numbers differ per rank. Does not wait."""
    run = Run(path, env)
    args = ["--run-dir", str(path), str(JOB), "--step-s", str(step_s), "--dropout", "0"]
    run.hpctrain("submit", *shape, *args)
    return run


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    """The undisturbed run; the number of ranks changes only rounding."""
    run = submit(
        tmp_path_factory.mktemp("reference") / "run", {}, ["--backend", "local", "--nodes", "1:2"], step_s=0.0
    )
    assert run.wait() == 0
    assert run.status()["nodes"] == 2
    return run


def assert_same_training_and_cleaned_up(run: Run, reference: Run) -> None:
    assert_same_training(run, reference)
    assert_no_process_left(run.path)


def sizes(run: Run) -> list[tuple[int, int]]:
    return [(event["nodes"], event["world_size"]) for event in run.events("started")]


@pytest.fixture
def free_nodes(slurm):
    """Wait until the cluster's nodes are free, before and after the test."""

    def all_idle() -> bool:
        return set(slurm.node_states().values()) == {"idle"}

    wait_for(all_idle, 60, "idle nodes", 0.2)
    yield
    for node, state in slurm.node_states().items():
        if "down" in state:
            slurm.start_node(node)
    wait_for(all_idle, 60, "idle nodes", 0.2)


def test_dead_node_shrinks_the_run(slurm, reference, free_nodes, tmp_path):
    run = submit(tmp_path / "run", slurm.env, SHAPE, step_s=0.2)
    run.wait_for_step(8)
    victim = slurm.nodes[2]
    slurm.kill_node(victim)
    try:
        wait_for(lambda: len(run.events("started")) == 2, 60, "the start on the nodes that are left")
        assert run.status()["nodes"] == 3
        assert run.wait() == 0
    finally:
        slurm.start_node(victim)
    assert sizes(run) == [(4, 8), (3, 6)]
    (shrink,) = run.events("shrink")
    assert (shrink["nodes_before"], shrink["nodes"], shrink["lost"]) == (4, 3, [victim])
    assert run.events("failure")[0]["host"] == victim
    assert run.events("requeue") == []
    assert_same_training_and_cleaned_up(run, reference)


def test_run_starts_with_the_free_nodes(slurm, reference, free_nodes, tmp_path):
    blocking = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "-o/dev/null", "--wrap=sleep 300"]
    blocker = run_command(blocking, slurm.env).stdout.strip()
    try:
        run = submit(tmp_path / "run", slurm.env, SHAPE, step_s=0.2)
        run.wait_for_step(3)
    finally:
        run_command(["scancel", blocker], slurm.env)
    # After the requeue, it gets the nodes that are free then.
    wait_for(lambda: list(slurm.node_states().values()).count("idle") == 2, 30, "free nodes", 0.2)
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    assert sizes(run) == [(2, 4), (4, 8)]
    assert_same_training_and_cleaned_up(run, reference)


def test_run_grows_when_nodes_become_free(slurm, reference, free_nodes, tmp_path):
    blocking = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "-o/dev/null", "--wrap=sleep 300"]
    blocker = run_command(blocking, slurm.env).stdout.strip()
    try:
        run = submit(tmp_path / "run", slurm.env, [*SHAPE, "--set", "scale_up_after=3"], step_s=0.5)
        run.wait_for_step(3)
    finally:
        run_command(["scancel", blocker], slurm.env)
    assert run.wait() == 0
    assert sizes(run) == [(2, 4), (4, 8)]
    (grow,) = run.events("grow")
    assert (grow["nodes_before"], grow["nodes"]) == (2, 4)
    assert_same_training_and_cleaned_up(run, reference)


def test_returned_node_is_used_again(slurm, reference, free_nodes, tmp_path):
    run = Run(tmp_path / "run", slurm.env)
    args = [
        "--run-dir",
        str(run.path),
        str(JOB),
        "--step-s",
        "0.5",
        "--slow-attempts",
        "2",
        "--dropout",
        "0",
    ]
    run.hpctrain("submit", *SHAPE, "--set", "scale_up_after=5", *args)
    run.wait_for_step(8)
    victim = slurm.nodes[3]
    slurm.kill_node(victim)
    try:
        wait_for(lambda: len(run.events("started")) == 2, 60, "the start on the nodes that are left")
    finally:
        slurm.start_node(victim)
    assert run.wait() == 0
    assert sizes(run) == [(4, 8), (3, 6), (4, 8)]
    assert [event["kind"] for event in run.dir.read_events() if event["kind"] in ("shrink", "grow")] == [
        "shrink",
        "grow",
    ]
    assert_same_training_and_cleaned_up(run, reference)


def test_node_set_down_by_an_administrator_does_no_harm(slurm, reference, free_nodes, tmp_path):
    run = submit(tmp_path / "run", slurm.env, SHAPE, step_s=0.2)
    run.wait_for_step(8)
    victim = slurm.nodes[1]
    try:
        down = ["scontrol", "update", f"NodeName={victim}", "State=DOWN", "Reason=test"]
        run_command(down, slurm.env)
        assert run.wait() == 0
    finally:
        # Refused if it is back already.
        resume = ["scontrol", "update", f"NodeName={victim}", "State=RESUME"]
        run_command(resume, slurm.env, check=False)
    # Slurm requeues the job at once; the node may be back before it starts again.
    (first, _), (second, _) = sizes(run)
    assert (first, second in (3, 4)) == (4, True)
    assert_same_training_and_cleaned_up(run, reference)


def test_death_of_the_supervisors_node_does_no_harm(slurm, reference, free_nodes, tmp_path):
    run = submit(tmp_path / "run", slurm.env, SHAPE, step_s=0.2)
    run.wait_for_step(8)
    victim = run.events("started")[0]["hosts"][0]
    slurm.kill_node(victim)
    try:
        # Slurm delays the requeued job by two minutes.
        assert run.wait(RUN_LIMIT_S + 120) == 0
    finally:
        slurm.start_node(victim)
    assert [number for number, _ in sizes(run)] == [4, 3]
    assert_same_training_and_cleaned_up(run, reference)


def test_run_is_requeued_with_fewer_nodes_than_the_minimum(slurm, reference, free_nodes, tmp_path):
    run = submit(tmp_path / "run", slurm.env, ["--nodes", "3:3", "--gpus-per-node", "2"], step_s=0.2)
    run.wait_for_step(8)
    victim = run.events("started")[0]["hosts"][2]
    slurm.kill_node(victim)
    try:
        wait_for(lambda: run.events("requeue"), RUN_LIMIT_S, "the requeue")
        assert run.wait() == 0
    finally:
        slurm.start_node(victim)
    assert {number for number, _ in sizes(run)} == {3}
    assert victim not in run.events("started")[-1]["hosts"]
    assert run.events("shrink") == []
    assert_same_training_and_cleaned_up(run, reference)
