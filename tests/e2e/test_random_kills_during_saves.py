"""SIGKILL to ranks at random moments while every step is saved in the background."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest
from helpers.processes import assert_no_process_left
from helpers.training_runs import LAST_STEP, Run, any_rank, assert_undisturbed, submit

from hpctrain.checkpoint.listing import list_checkpoints

SHAPE = ["--backend", "local", "--nodes", "2", "--gpus-per-node", "2"]
WORLD_SIZE = 4

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = submit(tmp_path_factory.mktemp("reference") / "run", {}, SHAPE, step_s=0.0)
    assert run.wait() == 0
    return run


@pytest.mark.parametrize("round_", range(3))
def test_killed_run_equals_the_undisturbed_one_and_loses_at_most_two_steps(reference, tmp_path, round_):
    rng = random.SystemRandom()
    run = submit(tmp_path / "run", {}, SHAPE, step_s=0.1, checkpoint_every=1)
    run.wait_for_step(rng.randrange(2, LAST_STEP // 2))
    time.sleep(rng.uniform(0.0, 0.2))
    ranks = run.ranks()
    for victim in {any_rank(WORLD_SIZE), any_rank(WORLD_SIZE)}:
        os.kill(ranks[victim].pid, signal.SIGKILL)
    assert run.wait() == 0
    (resumed,) = run.events("resumed")
    recorded = max(event["step"] for event in run.events("checkpoint") if event["attempt"] == 0)
    # The commit is on disk just before its event is recorded; no recorded checkpoint is lost.
    assert recorded <= resumed["step"] <= recorded + 1
    assert_undisturbed(run, reference)
    listed, _ = list_checkpoints(run.dir, verify=True)
    assert [checkpoint.problems for checkpoint in listed] == [()] * len(listed)
    assert_no_process_left(run.path)
