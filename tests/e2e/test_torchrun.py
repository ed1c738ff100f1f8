"""torchrun agents under the supervisor: requeue, crashes and their causes, with a plain PyTorch script."""

import json
import os
import signal

import pytest
from helpers.processes import assert_no_process_left, run_processes
from helpers.training_runs import RUN_LIMIT_S, Run, submit_script
from helpers.waiting import wait_for

#: Each attempt follows the first argument; the last one sums over the ranks.
SCRIPT = """
import json, os, signal, sys, time
attempt, rank = int(os.environ["HPCTRAIN_ATTEMPT"]), int(os.environ["RANK"])
plan = json.loads(sys.argv[1])
task = plan[attempt] if attempt < len(plan) else "sum"
print("ready", attempt, flush=True)
if task == "wait":
    time.sleep(600)
if task == "raise" and rank == 2:
    raise RuntimeError("boom")
if task == "kill" and rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
if task != "sum":
    time.sleep(600)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([rank + 1])
dist.all_reduce(total)
assert os.environ["TORCHELASTIC_MAX_RESTARTS"] == "0"
dist.barrier()
dist.destroy_process_group()
print(json.dumps({"sum": total.item(), "cwd": os.getcwd(), "threads": os.environ["OMP_NUM_THREADS"]}))
"""


def submit(tmp_path, env, shape, plan) -> Run:
    options = ["--launcher=torchrun", *shape]
    return submit_script(tmp_path, SCRIPT, json.dumps(plan), options=options, env=env)


def wait_until_ready(run: Run, attempt: int, ranks: int = 4) -> None:
    logs = [run.dir.rank_log(attempt, rank) for rank in range(ranks)]
    wait_for(
        lambda: all(log.exists() and f"ready {attempt}" in log.read_text() for log in logs),
        RUN_LIMIT_S,
        f"the ranks of attempt {attempt}",
    )


def assert_summed(run: Run, attempt: int, ranks: int = 4) -> None:
    for rank in range(ranks):
        result = json.loads(run.dir.rank_log(attempt, rank).read_text().splitlines()[-1])
        assert result["sum"] == ranks * (ranks + 1) // 2
    assert run.status()["state"] == "COMPLETED"
    assert run.status()["attempt"] == attempt
    assert_no_process_left(run.path)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_crash_is_reported_and_all_ranks_restart(tmp_path):
    shape = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "2", "--max-failures", "4"]
    shape += ["--restart-policy", "user-error.retries=1"]
    run = submit(tmp_path, {}, shape, ["raise", "kill"])
    assert run.wait() == 0
    first, second = run.events("failure")
    assert (first["rank"], first["cause"].endswith("RuntimeError: boom")) == (2, True)
    assert (second["rank"], "SIGKILL" in second["cause"]) == (3, True)
    assert_summed(run, 2)


@pytest.mark.extended
@pytest.mark.timeout(240)  # above RUN_LIMIT_S, so that a wait reports what it waited for
def test_stop_requests_reach_the_ranks_and_no_rank_outlives_its_agent(tmp_path):
    run = submit(tmp_path, {}, ["--backend", "local", "--ntasks-per-node", "2"], ["wait", "wait", "wait"])
    wait_until_ready(run, 0, 2)
    run.hpctrain("requeue", str(run.path))
    wait_until_ready(run, 1, 2)
    assert run.events("failure") == []
    (agent,) = [
        process for process in run_processes(run.path) if "hpctrain.runtime.torchrun_agent" in process.argv
    ]
    os.kill(agent.pid, signal.SIGKILL)
    wait_until_ready(run, 2, 2)
    (failure,) = run.events("failure")
    assert "SIGKILL" in failure["cause"]
    assert failure["log"] == str(run.dir.agent_log(1, 0))
    ranks = [process for process in run_processes(run.path) if "hpctrain.runtime.worker" in process.argv]
    assert {process.environ["HPCTRAIN_ATTEMPT"] for process in ranks if "RANK" in process.environ} == {"2"}
    run.hpctrain("cancel", str(run.path))
    assert run.wait() == 4
    assert run.status()["state"] == "CANCELLED"
    assert_no_process_left(run.path)
