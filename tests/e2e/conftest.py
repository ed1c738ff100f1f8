"""The cluster that the tests share is free before each of them, and after it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from helpers.commands import run_command

from hpctrain.sandbox import Sandbox

#: A job that was cancelled, or has done its work, is gone by then; a node that was killed is back.
_LIMIT_S = 30.0


@pytest.fixture(autouse=True)
def _free_cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    """Another test's jobs and dead nodes do not keep this one waiting; what it leaves itself fails it."""
    if "slurm" not in request.fixturenames:
        yield
        return
    cluster: Sandbox = request.getfixturevalue("slurm")
    if _trouble(cluster, _LIMIT_S):
        _tidy(cluster)
        assert not (trouble := _trouble(cluster, _LIMIT_S)), f"the cluster cannot be used: {trouble}"
    yield
    trouble = _trouble(cluster, _LIMIT_S)
    if trouble:
        _tidy(cluster)
    assert not trouble, f"the test left the cluster so: {trouble}"


def _trouble(cluster: Sandbox, limit_s: float) -> str:
    """Jobs that are still there after so many seconds, and nodes that take none; empty where all is well."""
    deadline = time.monotonic() + limit_s
    while True:
        jobs = run_command(["squeue", "--noheader", "--format=%i %j %T %r"], cluster.env).stdout.strip()
        nodes = {node: state for node, state in cluster.node_states().items() if state != "idle"}
        if not jobs and not nodes:
            return ""
        if time.monotonic() > deadline:
            return f"jobs {jobs.splitlines()}, nodes {nodes}"
        time.sleep(0.1)


def _tidy(cluster: Sandbox) -> None:
    for job in run_command(["squeue", "--noheader", "--format=%i"], cluster.env).stdout.split():
        run_command(["scancel", job], cluster.env, check=False)
    cluster.start()
    for node in cluster.nodes:
        cluster.start_node(node)
