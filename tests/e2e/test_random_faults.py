"""Faults at random moments: start-up, steps, saves, validation, end. Takes minutes."""

import random
import time

import pytest
from helpers.training_runs import any_rank, assert_undisturbed, submit
from helpers.waiting import wait_for

SHAPES = {"local": ["--backend", "local", "--nodes", "2", "--gpus-per-node", "2"]}
SHAPES["slurm"] = SHAPES["local"][2:]

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize("_round", range(10))
@pytest.mark.parametrize("fault", ["requeue", "kill"])
@pytest.mark.parametrize("backend", SHAPES)
def test_fault_at_a_random_moment(request, reference, tmp_path, backend, fault, _round):
    env = request.getfixturevalue("slurm").env if backend == "slurm" else {}
    run = submit(tmp_path / "run", env, SHAPES[backend], step_s=0.1)
    wait_for(lambda: run.events("started"), 60, "the start of the workers")
    # Four ranks take about four seconds to start and six to train.
    time.sleep(random.SystemRandom().uniform(0, 10))
    if fault == "requeue":
        run.hpctrain("requeue", str(run.path))
    elif (victim := any_rank(4)) in run.ranks():
        run.kill_rank(victim)
    assert run.wait() == 0
    assert_undisturbed(run, reference(4))
