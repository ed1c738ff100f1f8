"""Strategies besides ddp are preempted on a real Slurm, and come to the undisturbed run's result."""

from __future__ import annotations

import pytest
from e2e_runs import LAST_STEP, assert_undisturbed, submit
from helpers import assert_no_process_left, run_command

SHAPE = ["--nodes", "2", "--gpus-per-node", "2"]

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]


@pytest.mark.parametrize("strategy", ["fsdp", "zero1", "ddp2", "pipeline"])
def test_preempted_and_resumed(slurm, tmp_path, strategy):
    options = ["--env", f"HPCTRAIN_STRATEGY={strategy}"]
    reference = submit(tmp_path / "reference", slurm.env, SHAPE, options=options, step_s=0.0)
    assert reference.wait() == 0
    run = submit(tmp_path / "run", slurm.env, SHAPE, options=options, step_s=0.2)
    run.wait_for_step(10)
    urgent = [
        "sbatch",
        "--partition=urgent",
        "--nodes=4",
        "--exclusive",
        "--output=/dev/null",
        "--wrap=sleep 2",
    ]
    run_command(urgent, slurm.env)
    assert run.wait() == 0
    assert len(run.events("requeue")) == 1
    (stop,) = run.events("signal")
    assert run.events("resumed")[0]["step"] == stop["step"] < LAST_STEP
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)
