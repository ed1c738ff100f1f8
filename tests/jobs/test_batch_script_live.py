"""The template `plain`, `teardown`, `--srun-arg` and the choice of CPUs on a real Slurm."""

import json
import sys
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.commands import environment, run_command
from helpers.training_runs import preempt
from helpers.waiting import wait_for

from hpctrain.errors import RunFailed, SpecError
from hpctrain.jobs.runs.run import Run
from hpctrain.jobs.submit.prepare import prepare_submission
from hpctrain.rundir import RunDir

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

#: Prints a rank's variables. It needs nothing but Python, because its environment has no hpctrain.
PRINT_RANK = """
import importlib.util, json, os, sys, time
names = ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
names.append("A")
has_hpctrain = importlib.util.find_spec("hpctrain") is not None
print(json.dumps([has_hpctrain, sys.argv[1:], {name: os.environ[name] for name in names}]), flush=True)
if "SLURM_RESTART_COUNT" not in os.environ:
    time.sleep(float(sys.argv[2]))
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def submit_plain(environ, tmp_path):
    """Submit `PRINT_RANK` with the template `plain`, in an environment without hpctrain."""

    def call(*arguments: str) -> Run:
        (tmp_path / "rank.py").write_text(PRINT_RANK)
        venv, run_dir = tmp_path / "bare env", tmp_path / "my run"
        run_command([sys.executable, "-m", "venv", "--without-pip", venv])
        options = ["--template", "plain", "--venv", venv, "--run-dir", run_dir, "--env", "A=x 'y"]
        shape = ["--nodes", "2", "--ntasks-per-node", "2"]
        # The job inherits the variables of the submission, and must not find hpctrain through PYTHONPATH.
        start = (
            f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from hpctrain.cli.main import main; main()"
        )
        command = [sys.executable, "-c", start, "submit", *options, *shape, tmp_path / "rank.py", *arguments]
        run_command(command, environ | {"PYTHONPATH": ""}, cwd=tmp_path)
        return Run(RunDir(run_dir), environ)

    return call


def read_ranks(run: Run, attempt: int = 0) -> list[list[object]]:
    return [json.loads(run.dir.rank_log(attempt, rank).read_text()) for rank in range(4)]


def test_plain_script_runs_without_hpctrain(submit_plain):
    run = submit_plain("0", "0", "--name", "a b")
    run.wait(timeout=100)
    ranks = read_ranks(run)
    assert [(has_hpctrain, argv) for has_hpctrain, argv, _ in ranks] == [
        (False, ["0", "0", "--name", "a b"])
    ] * 4
    variables = [values for _, _, values in ranks]
    assert [(of["RANK"], of["LOCAL_RANK"], of["NODE_RANK"]) for of in variables] == [
        *(("0", "0", "0"), ("1", "1", "0"), ("2", "0", "1"), ("3", "1", "1"))
    ]
    shared = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "A", "MASTER_ADDR", "MASTER_PORT")
    (values,) = {tuple(of[name] for name in shared) for of in variables}
    assert values[:3] == ("4", "2", "x 'y")


def test_failure_of_a_plain_script_is_reported(submit_plain, environ):
    run = submit_plain("3", "0")
    # srun reports the highest code, which is 143 for a rank that it ends after the first failure.
    with pytest.raises(RunFailed, match=r"srun exited with code (3|143)"):
        run.wait(timeout=100)
    assert run.status().state == "FAILED"
    report = run_command([sys.executable, "-m", "hpctrain", "report", run.dir.path], environ, check=False)
    assert "ran without hpctrain in the job (--template plain)" in report.stderr
    run.dir.rank_log(0, 1).write_text("Traceback (most recent call last):\nValueError: bad\n")
    errors = run_command([sys.executable, "-m", "hpctrain", "logs", "--errors", run.dir.path], environ)
    assert "srun exited with code" in errors.stdout
    assert "rank-00001.log:\n  Traceback (most recent call last):\n  ValueError: bad" in errors.stdout


@pytest.mark.extended
def test_preempted_plain_job_is_requeued_by_slurm(submit_plain, slurm, environ):
    run = submit_plain("0", "60")
    log = run.dir.rank_log(0, 3)
    wait_for(lambda: log.exists() and log.read_text(), 60, "the output of the ranks")
    with pytest.raises(SpecError, match=r"without hpctrain in the job.* scontrol requeue"):
        run.requeue()
    preempt(environ, nodes=len(slurm.nodes), seconds=0)
    wait_for(lambda: run.status().state == "PENDING", 100, "the requeue")
    run_command(["scontrol", "update", f"JobId={run.job_id}", "StartTime=now+2"], environ)
    run.wait(timeout=100)
    assert len(read_ranks(run, attempt=1)) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "local"}, "the backend is local"),
        ({"nodes": "1:2"}, "--nodes 1:2 needs hpctrain in the job"),
        ({"spare_nodes": 1}, "--spare-nodes needs"),
        ({"array": "0-1"}, "--array needs"),
        ({"launcher": "torchrun"}, "--launcher torchrun needs"),
        ({"stage": ["/etc/hosts"]}, "--stage needs"),
        ({"notify": ["true"]}, "--notify needs"),
        ({"gpus_per_node": 4, "ntasks_per_node": 2}, "several GPUs each needs"),
    ],
)
def test_plain_refuses_what_needs_the_supervisor(environ, tmp_path, options, message):
    with pytest.raises(SpecError, match=message):
        prepare(environ, tmp_path, template="plain", **options)


def test_plain_refuses_a_batch_script(environ, tmp_path):
    (tmp_path / "train.py").write_text("#!/bin/sh\nsrun hostname\n")
    with pytest.raises(SpecError, match=r"train.py is a batch script, which --template plain would run once"):
        prepare(environ, tmp_path, template="plain")


def test_template_that_extends_plain_needs_no_supervisor(environ, tmp_path):
    (tmp_path / "mine.j2").write_text(
        '{% extends "plain.sbatch.j2" %}\n{% block setup %}\n{{ super() -}}\nulimit -c 0\n{% endblock %}\n'
    )
    script = prepare(environ, tmp_path, template="./mine.j2").script
    assert "ulimit -c 0\n" in script
    assert "hpctrain.supervisor" not in script


def prepare(environ, folder: Path, **options):
    (folder / "train.py").touch()
    options = {"backend": "slurm", "code_snapshot": False} | options
    return prepare_submission(
        "train.py", [], options, environ=environ, cwd=folder, python=options.pop("python", sys.executable)
    )


@pytest.mark.parametrize("stop", ["completed", "cancelled"])
def test_teardown_runs_after_the_supervisor(environ, tmp_path, stop):
    (tmp_path / "train.py").write_text(f"import time\ntime.sleep({60 if stop == 'cancelled' else 0})\n")
    run_dir, mark = tmp_path / "run", tmp_path / "mark"
    (tmp_path / "hpctrain.yaml").write_text(f"teardown: ['false', 'ls {run_dir}/logs > {mark}']\n")
    run_command(
        [
            *(sys.executable, "-m", "hpctrain", "submit", "--run-dir", run_dir, "--no-code-snapshot"),
            "train.py",
        ],
        environ,
        cwd=tmp_path,
    )
    run = Run(RunDir(run_dir), environ)
    if stop == "cancelled":
        wait_for(lambda: run.status().state == "RUNNING" and run.dir.attempts(), 60, "the start")
        run.cancel()
    wait_for(lambda: run.status().state.ended, 60, "the end of the run")
    assert run.status().state == stop.upper()
    wait_for(lambda: mark.exists() and mark.read_text(), 30, "the output of the teardown")
    assert "supervisor.log" in mark.read_text()


def test_setup_and_teardown_run_in_the_folder_of_the_submission(tmp_path):
    (tmp_path / "env.sh").write_text("export FROM_SETUP=yes\n")
    (tmp_path / "train.py").write_text("import os\nprint(os.environ['FROM_SETUP'])\n")
    options = ["--setup", "source ./env.sh", "--setup", "cd /", "--set", "teardown=touch mark"]
    local = ["--backend", "local", "--no-code-snapshot", "--run-dir", tmp_path / "run", "--follow"]
    command = [sys.executable, "-m", "hpctrain", "submit", *options, *local, "train.py"]
    assert run_command(command, environment(), cwd=tmp_path).stdout == "yes\n"
    wait_for((tmp_path / "mark").exists, 60, "the teardown")


def test_srun_options_reach_the_ranks(environ, tmp_path):
    (tmp_path / "train.py").write_text("import os\nprint(os.environ.get('SLURM_CPU_BIND_TYPE'))\n")
    run_dir = tmp_path / "run"
    run_command(
        [
            *(sys.executable, "-m", "hpctrain", "submit", "--run-dir", run_dir, "--no-code-snapshot"),
            *("--srun-arg=--cpu-bind=none", "train.py"),
        ],
        environ,
        cwd=tmp_path,
    )
    run = Run(RunDir(run_dir), environ)
    run.wait(timeout=100)
    assert run.dir.rank_log(0, 0).read_text() == "none\n"


@pytest.mark.parametrize(
    ("srun_arg", "message"),
    [
        ("cpu-bind=none", "not an option of srun"),
        ("--nodes=3", "cannot set --nodes, which hpctrain sets"),
        ("--nod=3", "cannot set --node"),
        ("--help", "cannot set --help"),
        ("-xn1", "cannot set --exclude"),
        ("-K1", "cannot set --kill-on-bad-exit"),
        ("--distribution=cyclic", "consecutive numbers"),
        ("-mplane=2", "consecutive numbers"),
    ],
)
def test_srun_options_of_the_supervisor_are_refused(environ, tmp_path, srun_arg, message):
    with pytest.raises(SpecError, match=message):
        prepare(environ, tmp_path, srun_arg=[srun_arg])


def test_variables_of_srun_apply(environ, tmp_path):
    variables = {"SLURM_CPU_BIND": "cores", "SLURM_DISTRIBUTION": "block:cyclic"}
    submission = prepare(environ | variables, tmp_path)
    assert submission.spec.srun_args == ("--cpu-bind=cores", "--distribution=block:cyclic")
    assert "srun --cpu-bind=cores, from the variable SLURM_CPU_BIND" in "\n".join(submission.notes)
    with pytest.raises(SpecError, match="consecutive numbers"):
        prepare(environ | {"SLURM_DISTRIBUTION": "cyclic"}, tmp_path)
    inside_a_job = prepare(environ | variables | {"SLURM_JOB_ID": "1"}, tmp_path)
    assert inside_a_job.spec.srun_args == ()


@pytest.mark.parametrize(
    ("options", "cpus"),
    [
        ({"gpus_per_node": 2}, 4),
        ({"gpus_per_node": 1}, 4),
        ({"gpus_per_node": 1, "exclusive": True}, 8),
        ({"gpus_per_node": 2, "cpus_per_task": 1}, 1),
        ({}, None),
    ],
)
def test_ranks_get_the_share_of_their_gpus_of_the_cpus(environ, tmp_path, options, cpus):
    """Nodes of the cluster have 8 CPUs and 2 GPUs."""
    submission = prepare(environ, tmp_path, **options)
    assert submission.spec.cpus_per_task == cpus
    says = "of the 8 CPUs of a node" in "\n".join(submission.notes)
    assert says is ("gpus_per_node" in options and "cpus_per_task" not in options)
    directive = None if cpus is None else f"#SBATCH --cpus-per-task={cpus}"
    assert (directive in submission.script.splitlines()) is (cpus is not None)


def test_defaults_of_the_partition_are_named(environ, tmp_path):
    notes = prepare(environ, tmp_path).notes
    assert "Without --time, the job has no time limit (default of partition preemptible)." in notes
    assert not any("Without --time" in note for note in prepare(environ, tmp_path, time="5").notes)


def test_plain_names_options_without_effect(environ, tmp_path):
    notes = "\n".join(prepare(environ, tmp_path, template="plain", hang_timeout=60).notes)
    assert "--hang-timeout has no effect: hpctrain does not run in the job (--template plain)." in notes
    assert "Slurm requeues the job only after a preemption" in notes
