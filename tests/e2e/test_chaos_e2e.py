"""Runs with faults from `hpctrain chaos` end like undisturbed ones."""

import json

import pytest
from helpers.training_runs import RUN_LIMIT_S, assert_undisturbed, submit

NODES = ["--nodes", "2", "--gpus-per-node", "1"]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_slurm_run_survives_every_fault(slurm, tmp_path, reference):
    run = submit(
        tmp_path / "run", slurm.env, NODES, options=["--hang-timeout", "5"], step_s=0.2, slow_attempts=9
    )
    faults = ["kill-rank", "stop-rank", "kill-supervisor", "preempt", "requeue", "kill-node-ranks"]
    for number, fault in enumerate(faults):
        run.wait_for_step(2 + 6 * number)
        options = ["--fault", fault, "--json"]
        injected = json.loads(run.hpctrain("chaos", str(run.path), *options, timeout=RUN_LIMIT_S).stdout)
        assert injected["faults"] == 1
    assert run.wait() == 0
    assert [injection["fault"] for injection in run.events("chaos")] == faults
    assert_undisturbed(run, reference(2))
