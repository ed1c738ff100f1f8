"""Standby workers: they replace ranks and behave like freshly started ones."""

import json
from pathlib import Path

import pytest
from helpers.processes import assert_no_process_left, run_processes
from helpers.training_runs import Run, submit_script
from helpers.waiting import wait_for

LOCAL = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "1"]

#: Train until killed once, and record the state of the process.
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


def submit(folder: Path, env: dict[str, str], shape: list[str], source: str = SCRIPT) -> Run:
    source = source.replace("__CHANGING__", repr(CHANGING))
    return submit_script(folder, source, str(folder), options=[*shape, "--standby-workers=1"], env=env)


def wait_for_standby(run: Run) -> None:
    log = run.dir.supervisor_log
    wait_for(lambda: log.exists() and "ready for attempt 1" in log.read_text(), 60, "workers that wait")


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("local", marks=pytest.mark.extended),
        pytest.param("slurm", marks=[pytest.mark.long, pytest.mark.slurm]),
    ],
)
def test_standby_worker_behaves_like_a_fresh_one(request, tmp_path, backend):
    env = request.getfixturevalue("slurm").env if backend == "slurm" else {}
    shape = ["--nodes", "2", "--gpus-per-node", "1"] if backend == "slurm" else LOCAL
    run = submit(tmp_path, env, shape)
    wait_for_standby(run)
    titles = [process.argv[-1].strip() for process in run_processes(run.path)]
    for title in ("standby worker: train.py", "rank 0 of 2: train.py", "rank 1 of 2: train.py"):
        assert title in titles
    run.kill_rank(1)
    assert run.wait() == 0
    assert "using 2 standby workers" in run.dir.supervisor_log.read_text()
    assert len(run.events("failure")) == 1
    assert_no_process_left(run.path)
    for rank in range(2):
        fresh, standby = (json.loads((tmp_path / f"seen-{n}-{rank}.json").read_text()) for n in range(2))
        for name in ("random", "seed"):
            assert fresh.pop(name) != standby.pop(name)
        for number, seen in enumerate((fresh, standby)):
            # The third one is standard input: /dev/null, or a pipe of Slurm's.
            assert seen.pop("descriptors").count(str(run.dir.rank_log(number, rank))) == 2
        assert standby == fresh
        log = run.dir.rank_log(1, rank).read_text()
        assert f"out of rank {rank}" in log
        assert f"err of rank {rank}" in log
        assert backend == "local" or standby["variables"]["SLURM_JOB_NAME"] == "train"


@pytest.mark.long
def test_no_standby_workers_when_the_script_sets_variables_before_imports(tmp_path):
    source = "import os\nos.environ['OMP_NUM_THREADS'] = '3'\n" + SCRIPT
    run = submit(tmp_path, {}, LOCAL, source)
    log, reason = run.dir.supervisor_log, "imports may read (OMP_NUM_THREADS)"
    wait_for(lambda: log.exists() and reason in log.read_text(), 60, "the reason why nobody waits")
    run.kill_rank(0)
    assert run.wait() == 0
    assert "using " not in log.read_text()
