"""The shared cluster is free before and after each test, and undisturbed runs are trained once."""

import time
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from helpers.commands import run_command
from helpers.training_runs import JOB, Run, train_on_forked_ranks
from helpers.waiting import deadline_in

from hpctrain.sandbox import Sandbox

#: Within it, jobs that were cancelled or are done have gone, and killed nodes are back.
_LIMIT_S = 60.0


@pytest.fixture(scope="session")
def reference(tmp_path_factory) -> Callable[..., Run]:
    """Return the undisturbed training on a number of ranks, with further arguments."""

    @cache
    def train(num_ranks: int, *arguments: str) -> Run:
        path = tmp_path_factory.mktemp("reference") / "run"
        return train_on_forked_ranks(path, JOB, ["--checkpoint-every", "6", *arguments], ranks=num_ranks)

    return train


@pytest.fixture
def free_nodes(slurm) -> Iterator[None]:
    """Restart killed nodes after the test."""
    yield
    for node, state in slurm.node_states().items():
        if "down" in state or "*" in state:
            slurm.start_node(node)


@pytest.fixture(autouse=True)
def _free_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait until other tests' jobs and dead nodes are gone; fail if this test leaves any."""
    if "slurm" not in request.fixturenames:
        yield
        return
    cluster: Sandbox = request.getfixturevalue("slurm")
    if _cluster_problem(cluster):
        _clean_up(cluster)
        assert not (problem := _cluster_problem(cluster)), f"the cluster cannot be used: {problem}"
    yield
    if problem := _cluster_problem(cluster):
        _clean_up(cluster)
    assert not problem, f"the test left the cluster so: {problem}"


def _cluster_problem(cluster: Sandbox) -> str:
    """Return jobs and unavailable nodes that remain after the limit; an empty string if there are none."""
    deadline = deadline_in(_LIMIT_S)
    while True:
        jobs = run_command(["squeue", "--noheader", "--format=%i %j %T %r"], cluster.env).stdout.strip()
        nodes = {node: state for node, state in cluster.node_states().items() if state != "idle"}
        if not jobs and not nodes:
            return ""
        if time.monotonic() > deadline:
            return f"jobs {jobs.splitlines()}, nodes {nodes}"
        time.sleep(0.1)


def _clean_up(cluster: Sandbox) -> None:
    for job in run_command(["squeue", "--noheader", "--format=%i"], cluster.env).stdout.split():
        run_command(["scancel", job], cluster.env, check=False)
    cluster.start()
    for node in cluster.nodes:
        cluster.start_node(node)
        # Slurm drains a node if processes on it did not end in time.
        run_command(["scontrol", "update", f"NodeName={node}", "State=RESUME"], cluster.env, check=False)
