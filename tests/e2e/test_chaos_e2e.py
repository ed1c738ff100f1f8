"""Runs with faults from `hpctrain chaos` end like undisturbed ones."""

from __future__ import annotations

import json

import pytest
from helpers.processes import assert_no_process_left
from helpers.training_runs import RUN_LIMIT_S, Run, assert_undisturbed, submit

LOCAL = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "1"]
NODES = ["--nodes", "2", "--gpus-per-node", "1"]


def chaos(run: Run, *options: str) -> dict:
    result = run.hpctrain("chaos", str(run.path), "--json", *options, timeout=RUN_LIMIT_S)
    return json.loads(result.stdout)


@pytest.mark.long
def test_local_run_survives_two_killed_ranks(tmp_path, tmp_path_factory):
    reference = submit(tmp_path_factory.mktemp("reference") / "run", {}, LOCAL, step_s=0.0)
    run = submit(tmp_path / "run", {}, LOCAL, step_s=0.1, slow_attempts=2)
    run.wait_for_step(7)
    preview = run.hpctrain("chaos", str(run.path), "--dry-run", "--seed", "1", "--fault", "kill-rank").stdout
    assert "would inject kill-rank: rank " in preview
    assert (run.events("chaos"), run.events("failure")) == ([], [])
    injected = chaos(run, "--fault", "kill-rank", "--times", "2", "--every", "6", "--seed", "1")
    assert injected == {"run_id": "run", "faults": 2, "seed": 1}
    assert (run.wait(), reference.wait()) == (0, 0)
    assert_undisturbed(run, reference)
    injections, failures = run.events("chaos"), run.events("failure")
    assert [injection["fault"] for injection in injections] == ["kill-rank", "kill-rank"]
    assert (
        [injection["attempt"] for injection in injections]
        == [failure["attempt"] for failure in failures]
        == [0, 1]
    )
    assert [injection["ranks"] for injection in injections] == [[failure["rank"]] for failure in failures]
    refused = run.hpctrain("chaos", str(run.path), check=False)
    assert (
        refused.returncode,
        "is COMPLETED. Only a run that is RUNNING can be disturbed" in refused.stderr,
    ) == (2, True)
    assert_no_process_left(run.path)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_slurm_run_survives_every_fault(slurm, tmp_path, tmp_path_factory):
    reference = submit(tmp_path_factory.mktemp("reference") / "run", slurm.env, NODES, step_s=0.0)
    assert reference.wait() == 0
    run = submit(
        tmp_path / "run", slurm.env, NODES, options=["--hang-timeout", "5"], step_s=0.2, slow_attempts=9
    )
    faults = ["kill-rank", "stop-rank", "kill-supervisor", "preempt", "requeue", "kill-node-ranks"]
    for number, fault in enumerate(faults):
        run.wait_for_step(2 + 6 * number)
        assert chaos(run, "--fault", fault)["faults"] == 1
    assert run.wait() == 0
    assert [injection["fault"] for injection in run.events("chaos")] == faults
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)
