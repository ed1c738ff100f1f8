"""The shared cluster is free before and after each test."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from helpers.commands import run_command
from helpers.waiting import deadline_in

from hpctrain.sandbox import Sandbox

#: Within it, jobs that were cancelled or are done have gone, and killed nodes are back.
_LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def _free_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Wait until other tests' jobs and dead nodes are gone; fail if this test leaves any."""
    if "slurm" not in request.fixturenames:
        yield
        return
    cluster: Sandbox = request.getfixturevalue("slurm")
    if _cluster_problem(cluster, _LIMIT_S):
        _clean_up(cluster)
        assert not (problem := _cluster_problem(cluster, _LIMIT_S)), f"the cluster cannot be used: {problem}"
    yield
    problem = _cluster_problem(cluster, _LIMIT_S)
    if problem:
        _clean_up(cluster)
    assert not problem, f"the test left the cluster so: {problem}"


def _cluster_problem(cluster: Sandbox, limit_s: float) -> str:
    """Return jobs and unavailable nodes that remain after the limit; an empty string if there are none."""
    deadline = deadline_in(limit_s)
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
