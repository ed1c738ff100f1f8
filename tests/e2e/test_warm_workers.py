"""Workers that wait: they take the place of ranks, and behave as if they had been started anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.processes import assert_no_process_left, run_processes
from helpers.training_runs import Run
from helpers.waiting import wait_for

LOCAL = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "1"]

#: Trains until it is killed once, and writes down what its process looks like from inside.
SCRIPT = """
import json, os, random, signal, sys, threading, time
seen = {
    "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "file": __file__, "cwd": os.getcwd(),
    "path": sys.path, "main": sys.modules["__main__"].__file__, "session": os.getsid(0) == os.getpid(),
    "threads": sorted(thread.name for thread in threading.enumerate()),
    "signals": {int(n): repr(signal.getsignal(n)).split(" at ")[0] for n in signal.valid_signals()},
    "variables": {n: v for n, v in os.environ.items() if n not in __CHANGING__},
    "descriptors": sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0] for n in (0, 1, 2)),
    "flags": str(sys.flags),
}
attempt = os.environ["HPCTRAIN_ATTEMPT"]
import torch
import torch.distributed as dist
seen |= {"seed": torch.initial_seed(), "cuda": torch.cuda.is_initialized()}
seen |= {"torch_threads": torch.get_num_threads()}
dist.init_process_group("gloo")
print("out of rank", os.environ["RANK"], flush=True)
print("err of rank", os.environ["RANK"], file=sys.stderr, flush=True)
with open(f"{sys.argv[1]}/seen-{attempt}-{dist.get_rank()}.json", "w") as file:
    json.dump(seen | {"random": random.random()}, file)
while attempt == "0":
    dist.all_reduce(torch.ones(1))
    time.sleep(0.02)
dist.barrier()
dist.destroy_process_group()
"""
#: Variables that differ between any two starts.
CHANGING = {
    *("HPCTRAIN_ATTEMPT", "MASTER_PORT", "SLURM_STEP_ID", "SLURM_STEPID", "SLURM_TASK_PID"),
    *("SLURM_SRUN_COMM_PORT", "SLURM_STEP_LAUNCHER_PORT", "SLURM_JOB_END_TIME", "HPCTRAIN_SECRET"),
}


def submit(folder: Path, env: dict[str, str], shape: list[str], text: str = SCRIPT, *options: str) -> Run:
    script = folder / "train.py"
    script.write_text(text.replace("__CHANGING__", repr(CHANGING)))
    run = Run(folder / "run", env)
    words = ["--standby-workers", "1", *options, "--run-dir", str(run.path), str(script), str(folder)]
    run.hpctrain("submit", *shape, *words)
    return run


def wait_ready(run: Run) -> None:
    log = run.dir.supervisor_log
    wait_for(lambda: log.exists() and "ready for attempt 1" in log.read_text(), 60, "workers that wait")


def take_over(folder: Path, env: dict[str, str], shape: list[str]) -> Run:
    """Kill a rank whose place another waits for, and let that end."""
    run = submit(folder, env, shape)
    wait_ready(run)
    run.kill_rank(1)
    assert run.wait() == 0
    assert "using 2 standby workers" in run.dir.supervisor_log.read_text()
    assert len(run.events("failure")) == 1
    assert_no_process_left(run.path)
    return run


def assert_as_fresh(folder: Path, run: Run) -> None:
    """What the two starts saw differs in nothing but what differs between any two starts."""
    for rank in range(2):
        fresh, warm = (json.loads((folder / f"seen-{n}-{rank}.json").read_text()) for n in range(2))
        for name in ("random", "seed"):
            assert fresh.pop(name) != warm.pop(name)
        for number, seen in enumerate((fresh, warm)):
            # The third one is standard input: nothing at all, or a pipe of Slurm's.
            assert seen.pop("descriptors").count(str(run.dir.rank_log(number, rank))) == 2
        assert warm == fresh
        log = run.dir.rank_log(1, rank).read_text()
        assert f"out of rank {rank}" in log
        assert f"err of rank {rank}" in log


def test_a_worker_that_waited_behaves_as_one_that_was_started_anew(tmp_path):
    assert_as_fresh(tmp_path, take_over(tmp_path, {}, LOCAL))


@pytest.mark.long
def test_workers_wait_on_nodes_of_slurm(slurm, tmp_path):
    assert_as_fresh(tmp_path, take_over(tmp_path, slurm.env, ["--nodes", "2", "--gpus-per-node", "1"]))
    seen = json.loads((tmp_path / "seen-1-0.json").read_text())
    assert seen["variables"]["SLURM_JOB_NAME"] == "train"


@pytest.mark.long
def test_a_requeue_meets_the_ranks_and_not_those_that_wait(slurm, tmp_path):
    run = submit(tmp_path, slurm.env, ["--nodes", "2", "--gpus-per-node", "1"])
    wait_ready(run)
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    assert (len(run.events("requeue")), run.events("failure")) == (1, [])
    assert_no_process_left(run.path)


def test_nobody_waits_where_the_script_sets_variables_before_its_imports(tmp_path):
    text = "import os\nos.environ['OMP_NUM_THREADS'] = '3'\n" + SCRIPT
    run = submit(tmp_path, {}, LOCAL, text)
    log = run.dir.supervisor_log
    wait_for(
        lambda: log.exists() and "no standby workers: the script sets OMP_NUM_THREADS" in log.read_text(),
        60,
        "the reason why nobody waits",
    )
    run.kill_rank(0)
    assert run.wait() == 0
    assert "using " not in log.read_text()


@pytest.mark.long
def test_a_worker_that_is_killed_while_it_waits_is_not_missed(tmp_path):
    run = submit(tmp_path, {}, LOCAL)
    wait_ready(run)
    waiting = [
        process
        for process in run_processes(run.path)
        if process.environ.get("HPCTRAIN_ATTEMPT") == "1" and "hpctrain.runtime.worker" in process.argv
    ]
    assert len(waiting) == 2
    waiting[0].kill()
    run.kill_rank(1)
    assert run.wait() == 0
    assert "using " not in run.dir.supervisor_log.read_text()
    assert_no_process_left(run.path)
