"""A rank that hangs before the all-reduce is detected, reported and restarted."""

import json
import os
import signal
import time

import pytest
from helpers.commands import run_command
from helpers.training_runs import assert_undisturbed, submit

LOCAL = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "1", "--set", "node_check=never"]
NODES = ["--nodes", "2", "--gpus-per-node", "1"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mode", ["loop", "frozen", "stopped"])
def test_hang_on_slurm_is_detected_and_the_run_restarted(slurm, reference, tmp_path, mode):
    options = {"options": ["--hang-timeout", "3"], "further": ["--hang", mode]}
    run = submit(tmp_path / "run", slurm.env, NODES, step_s=0.0, **options)
    assert run.wait() == 0
    (failure,) = run.events("failure")
    assert (failure["class"], failure["rank"]) == ("hang", 1)
    assert_undisturbed(run, reference(2))
    if mode in ("frozen", "stopped"):
        assert f"rank 1 on {failure['host']} is not responding" in failure["cause"]
    else:
        assert f"rank 1 on {failure['host']} is in never_return (train_classifier.py:" in failure["cause"]
        assert "1 of 2 ranks waiting in" in failure["cause"]
        stacks = [run.dir.stacks(0, rank).read_text() for rank in range(2)]
        assert ["in never_return" in text for text in stacks] == [False, True]
    if mode == "frozen":
        assert "in never_return" in run.dir.rank_log(0, 1).read_text()


@pytest.mark.extended
@pytest.mark.parametrize("suspended", [pytest.param("job", marks=pytest.mark.slurm), "ranks"])
def test_suspended_run_neither_hangs_nor_trains(request, tmp_path, suspended):
    if suspended == "job":
        env, shape = request.getfixturevalue("slurm").env, [*NODES, "--hang-timeout", "5"]
    else:
        env, shape = {}, LOCAL
    run = submit(tmp_path / "run", env, shape, step_s=0.1)
    run.wait_for_step(4)
    job, pids = run.events("submitted")[0]["job_id"], [process.pid for process in run.ranks().values()]
    for action, number, pause_s in (("suspend", signal.SIGSTOP, 15.0), ("resume", signal.SIGCONT, 0.0)):
        if suspended == "job":
            run_command(["scontrol", action, job], env)
        else:
            for pid in pids:
                os.kill(pid, number)
        time.sleep(pause_s)
    assert run.wait() == 0
    (pause,) = run.events("paused")
    assert 11 < pause["seconds"] < 60
    assert run.events("failure") == run.events("straggler") == []
    report = json.loads(run.hpctrain("report", str(run.path), "--json").stdout)
    (idle_us,) = (entry["us"] for entry in report["ledger"] if entry["what"] == "idle")
    assert idle_us > 10e6
