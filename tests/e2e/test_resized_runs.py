"""Submitted runs whose number of ranks changes have the bits of a run on one rank."""

from __future__ import annotations

import pytest
from helpers.training_runs import assert_undisturbed, submit
from helpers.waiting import wait_for


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("backend", ["local", "slurm"])
def test_killed_and_resized_run_has_the_bits_of_one_rank(request, reference, tmp_path, backend):
    """Train on three ranks, kill a rank, cancel, and resume on two ranks."""
    env = request.getfixturevalue("slurm").env if backend == "slurm" else {}
    shape = [f"--backend={backend}", "--ntasks-per-node=3"]
    elastic = ["--grain-size", "4"]
    run = submit(tmp_path / "run", env, shape, step_s=0.1, slow_attempts=2, further=elastic)
    run.wait_for_step(8)
    run.kill_rank(1)
    wait_for(lambda: run.events("failure"), 60, "the failure")
    run.wait_for_step(16)
    run.hpctrain("cancel", str(run.path))
    run.wait()
    run.hpctrain("resume", str(run.path), "--ntasks-per-node", "2")
    assert run.wait() == 0, run.describe()
    assert {event["world_size"] for event in run.events("started")} == {3, 2}
    assert_undisturbed(run, reference(1, *elastic))
