"""Runs submitted inside other jobs: their ranks see the same environment as from a login node."""

import json
import os
import shlex
import sys

import pytest
from helpers.commands import run_command
from helpers.waiting import wait_for

#: Slurm may delay a job by two minutes.
pytestmark = pytest.mark.timeout(400)

DUMP = """
import json, os
if os.environ["RANK"] == "1":
    with open(os.path.join(os.environ["HPCTRAIN_RUN_DIR"], "environ.json"), "w") as file:
        json.dump(dict(os.environ), file)
"""
SUBMIT_FROM_PYTHON = """
import hpctrain
hpctrain.submit("dump.py", run_dir="from a rank", ntasks_per_node=2, cpus_per_task=3, mem="100")
"""
SHAPE = ["--ntasks-per-node", "2", "--cpus-per-task", "3", "--mem", "100"]
#: Variables that differ per job or belong to the shell.
OF_EACH_JOB = {
    *("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_TASK_PID", "SLURM_STEP_LAUNCHER_PORT", "SLURM_SRUN_COMM_PORT"),
    # Slurm 22.05 has none of these.
    *("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME", "SLURM_JOB_SLUID"),
    *("SLURM_JOB_NODELIST", "SLURM_NODELIST", "SLURM_STEP_NODELIST", "SLURM_TOPOLOGY_ADDR"),
    *("SLURM_PROCID", "SLURM_LOCALID", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *(
        "HPCTRAIN_RUN_DIR",
        "HPCTRAIN_SECRET",
        "HOSTNAME",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "PYTEST_CURRENT_TEST",
    ),
    "SLURMD_NODENAME",
}


@pytest.fixture(scope="module")
def environs(slurm, tmp_path_factory) -> dict[str, dict[str, str]]:
    """The environment of a rank, by the place of submission."""
    folder = tmp_path_factory.mktemp("submit")
    (folder / "dump.py").write_text(DUMP)
    (folder / "parent.py").write_text(SUBMIT_FROM_PYTHON)
    hpctrain = [sys.executable, "-m", "hpctrain"]

    def submit(name: str) -> list[str]:
        return [*hpctrain, "submit", *SHAPE, "--run-dir", str(folder / name), "dump.py"]

    step = ["srun", "--ntasks=1", "--cpu-bind=verbose,rank", "--mem-per-cpu=50", "--distribution=block"]
    job = folder / "outer.sbatch"
    job.write_text(
        "#!/bin/bash\n"
        "#SBATCH --array=7 --ntasks=2 --gpus-per-node=2 --gpu-bind=closest --mem-per-cpu=60\n"
        "#SBATCH --cpus-per-task=1 --hint=nomultithread --mem-bind=local\n"
        f"#SBATCH --job-name=outer --output={folder}/outer.log\n"
        f"{shlex.join([*step, *submit('from a step of an array')])}\n"
    )
    run_command(["sbatch", job], slurm.env, cwd=folder)
    parent = ["--cpus-per-task", "1", "--run-dir", "parent", "parent.py"]
    run_command([*hpctrain, "submit", *parent], slurm.env, cwd=folder)
    run_command(submit("from outside"), slurm.env, cwd=folder)
    environs = {}
    for name in ("from outside", "from a step of an array", "from a rank"):
        run = folder / name
        try:
            wait_for((run / "events.jsonl").exists, 180, f"the submission {name}")
        except AssertionError as error:
            queue = run_command(["scontrol", "show", "job"], slurm.env).stdout
            log = (folder / "outer.log").read_text() if (folder / "outer.log").exists() else "no log"
            raise AssertionError(f"{error}\n{log}\n{queue}") from None
        run_command([*hpctrain, "wait", run], slurm.env)
        environs[name] = json.loads((run / "environ.json").read_text())
    return environs


@pytest.mark.extended
@pytest.mark.parametrize("origin", ["from a step of an array", "from a rank"])
def test_ranks_see_the_same_variables_as_from_a_login_node(environs, origin):
    inside, outside = environs[origin], environs["from outside"]
    assert sorted(inside.keys() - OF_EACH_JOB) == sorted(outside.keys() - OF_EACH_JOB)
    same = {name for name in inside.keys() - OF_EACH_JOB if inside[name] == outside[name]}
    assert same == outside.keys() - OF_EACH_JOB
    assert inside["SLURM_JOB_ID"] != outside["SLURM_JOB_ID"]
    assert inside["SLURM_CONF"] == outside["SLURM_CONF"]


@pytest.mark.parametrize("origin", ["from outside", "from a step of an array", "from a rank"])
def test_ranks_get_the_requested_cpus(environs, origin):
    environ = environs[origin]
    assert environ["SLURM_CPUS_PER_TASK"] == "3"
    assert environ["SLURM_JOB_CPUS_PER_NODE"] == "6"
    assert environ["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "3")
    assert environ["SLURM_MEM_PER_NODE"] == "100"
    assert (
        "SLURM_CPU_BIND" not in environ
        or environ["SLURM_CPU_BIND"] == environs["from outside"]["SLURM_CPU_BIND"]
    )
