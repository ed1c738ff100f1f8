"""Runs with MIN:MAX nodes: they start on the free nodes and continue on those that are left."""

from functools import partial

import pytest
from helpers.commands import run_command
from helpers.training_runs import RUN_LIMIT_S, Run, assert_undisturbed, submit
from helpers.waiting import wait_for

SHAPE = ["--nodes", "2:4", "--gpus-per-node", "2"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


#: The random numbers of a dropout differ per rank.
NO_DROPOUT = ("--dropout", "0")


@pytest.fixture
def assert_same_training(reference):
    return partial(assert_undisturbed, reference=reference(2, *NO_DROPOUT), rounding=True)


def sizes(run: Run) -> list[tuple[int, int]]:
    return [(event["nodes"], event["world_size"]) for event in run.events("started")]


def test_run_grows_when_nodes_become_free(slurm, assert_same_training, free_nodes, tmp_path):
    blocking = ["sbatch", "--parsable", "--nodes=2", "--exclusive", "-o/dev/null", "--wrap=sleep 300"]
    blocker = run_command(blocking, slurm.env).stdout.strip()
    try:
        shape = [*SHAPE, "--set", "scale_up_after=3"]
        run = submit(tmp_path / "run", slurm.env, shape, step_s=0.5, further=NO_DROPOUT)
        run.wait_for_step(3)
    finally:
        run_command(["scancel", blocker], slurm.env)
    assert run.wait() == 0
    assert sizes(run) == [(2, 4), (4, 8)]
    (grow,) = run.events("grow")
    assert (grow["nodes_before"], grow["nodes"]) == (2, 4)
    assert_same_training(run)


def test_dead_node_shrinks_the_run_until_it_returns(slurm, assert_same_training, free_nodes, tmp_path):
    options = {"options": ["--set", "scale_up_after=5"], "slow_attempts": 2, "further": NO_DROPOUT}
    run = submit(tmp_path / "run", slurm.env, SHAPE, step_s=0.5, **options)
    run.wait_for_step(8)
    victim = slurm.nodes[3]
    slurm.kill_node(victim)
    wait_for(lambda: len(run.events("started")) == 2, 60, "the start on the nodes that are left")
    slurm.start_node(victim)
    assert run.wait() == 0
    assert sizes(run) == [(4, 8), (3, 6), (4, 8)]
    (shrink,), (grow,) = run.events("shrink"), run.events("grow")
    assert (shrink["nodes_before"], shrink["nodes"], shrink["lost"]) == (4, 3, [victim])
    assert (grow["nodes_before"], grow["nodes"]) == (3, 4)
    assert run.events("failure")[0]["host"] == victim
    assert_same_training(run)


def test_death_of_the_supervisors_node_does_no_harm(slurm, assert_same_training, free_nodes, tmp_path):
    run = submit(tmp_path / "run", slurm.env, SHAPE, step_s=0.2, further=NO_DROPOUT)
    run.wait_for_step(8)
    victim = run.events("started")[0]["hosts"][0]
    slurm.kill_node(victim)
    # Slurm delays the requeued job by two minutes.
    assert run.wait(RUN_LIMIT_S + 120) == 0
    assert [number for number, _ in sizes(run)] == [4, 3]
    assert_same_training(run)


def test_run_is_requeued_with_fewer_nodes_than_the_minimum(slurm, assert_same_training, free_nodes, tmp_path):
    shape = ["--nodes", "3:3", "--gpus-per-node", "2"]
    run = submit(tmp_path / "run", slurm.env, shape, step_s=0.2, further=NO_DROPOUT)
    run.wait_for_step(8)
    victim = run.events("started")[0]["hosts"][2]
    slurm.kill_node(victim)
    wait_for(lambda: run.events("requeue"), RUN_LIMIT_S, "the requeue")
    assert run.wait() == 0
    assert {number for number, _ in sizes(run)} == {3}
    assert victim not in run.events("started")[-1]["hosts"]
    assert run.events("shrink") == []
    assert_same_training(run)
