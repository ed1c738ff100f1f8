"""Faults at random moments: start-up, steps, saves, validation, end. Takes minutes."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from helpers.training_runs import LAST_STEP, any_rank, assert_undisturbed, submit
from helpers.waiting import wait_for

from hpctrain.checkpoint.listing import list_checkpoints

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


@pytest.mark.parametrize("_round", range(3))
def test_kills_while_every_step_is_saved_lose_at_most_two_steps(reference, tmp_path, _round):
    rng = random.SystemRandom()
    run = submit(tmp_path / "run", {}, SHAPES["local"], step_s=0.1, checkpoint_every=1)
    run.wait_for_step(rng.randrange(2, LAST_STEP // 2))
    time.sleep(rng.uniform(0.0, 0.2))
    ranks = run.ranks()
    for victim in {any_rank(4), any_rank(4)}:
        os.kill(ranks[victim].pid, signal.SIGKILL)
    assert run.wait() == 0
    (resumed,) = run.events("resumed")
    recorded = max(event["step"] for event in run.events("checkpoint") if event["attempt"] == 0)
    # The commit is on disk just before its event is recorded; no recorded checkpoint is lost.
    assert recorded <= resumed["step"] <= recorded + 1
    assert_undisturbed(run, reference(4))
    listed, _ = list_checkpoints(run.dir, verify=True)
    assert [checkpoint.problems for checkpoint in listed] == [()] * len(listed)
