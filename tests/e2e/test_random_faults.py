"""Faults at random moments: start-up, steps, saves, validation, end. Takes minutes."""

from __future__ import annotations

import random
import time

import pytest
from helpers.processes import assert_no_process_left
from helpers.training_runs import Run, any_rank, assert_undisturbed, submit
from helpers.waiting import wait_for

ROUNDS = 10
LOCAL = ["--backend", "local", "--nodes", "2", "--gpus-per-node", "2"]
SLURM = ["--nodes", "2", "--gpus-per-node", "2"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    run = submit(tmp_path_factory.mktemp("reference") / "run", {}, LOCAL, step_s=0.0)
    assert run.wait() == 0
    return run


@pytest.fixture(params=["local", "slurm"])
def backend(request):
    """Return the environment and options of the backend to run on."""
    if request.param == "local":
        return {}, LOCAL
    return request.getfixturevalue("slurm").env, SLURM


@pytest.mark.parametrize("_round", range(ROUNDS))
def test_requeue_at_a_random_moment(backend, reference, tmp_path, _round):
    run = run_until_random_moment(backend, tmp_path)
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)


@pytest.mark.parametrize("_round", range(ROUNDS))
def test_kill_of_a_rank_at_a_random_moment(backend, reference, tmp_path, _round):
    run = run_until_random_moment(backend, tmp_path)
    victim = any_rank(4)
    if victim in run.ranks():
        run.kill_rank(victim)
    assert run.wait() == 0
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)


def run_until_random_moment(backend, tmp_path) -> Run:
    """Four ranks take about four seconds to start and six to train."""
    env, shape = backend
    run = submit(tmp_path / "run", env, shape, step_s=0.1)
    wait_for(lambda: run.events("started"), 60, "the start of the workers")
    time.sleep(random.SystemRandom().uniform(0, 10))
    return run
