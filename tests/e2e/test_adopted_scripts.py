"""Batch scripts shaped after the documentation of clusters, submitted as they are, and disturbed.

The container runtime and conda are fakes. The scripts train a small model that saves and resumes itself, so
the weights of a disturbed run equal those of an undisturbed one.
"""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import SCRIPTS
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.training_runs import Run, preempt
from helpers.waiting import wait_for

from hpctrain.files import read_json_lines

ADOPTED = SCRIPTS / "adopted"
NUM_STEPS = 30
#: Seconds of a step of a run that is disturbed from outside, and of others.
SLOW_S, FAST_S = 0.3, 0.05
SCRIPT_NAMES = (
    *("plain_srun", "torchrun", "accelerate", "lightning", "array", "container", "conda", "bash_signal"),
    *("self_requeue", "chain", "several_steps", "own_master"),
)
#: Files with the results of a script, if there are several.
RESULTS = {"array": ["0/result", "1/result"], "several_steps": ["0/result", "1/result"]}
DISTURBANCES = ("undisturbed", "preempted", "killed", "hung")
#: Scripts that set the number of steps.
SHORT = ("self_requeue", "chain")
CHEAP = {
    *(("plain_srun", disturbance) for disturbance in ("preempted", "killed", "hung", "raised")),
    *(("several_steps", "undisturbed"), ("self_requeue", "undisturbed")),
}

pytestmark = pytest.mark.timeout(600)


def fake_programs(folder: Path, env: dict[str, str]) -> dict[str, str]:
    """Write a fake apptainer, and a fake conda with one environment; return the variables of the scripts."""
    image = folder / "torch.sif"
    image.write_text(json.dumps({"env": {"INSIDE": "1"}, "hidden": []}))
    programs, conda = folder / "bin", folder / "conda"
    activate = f"conda() {{ export CONDA_PREFIX={conda}/envs/$2 PATH={conda}/envs/$2/bin:$PATH; }}\n"
    files = {
        programs / "apptainer": f'exec {sys.executable} {SCRIPTS}/fake_container.py apptainer "$@"',
        programs / "module": "exit 0",
        conda / "envs/torch/bin/python": f'exec {sys.executable} "$@"',
        conda / "etc/profile.d/conda.sh": activate,
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    path = f"{programs}:{Path(sys.executable).parent}:{env.get('PATH', os.environ['PATH'])}"
    return {"IMAGE": str(image), "CONDA_ROOT": str(conda), "PATH": path, "TEST_PATH": path}


def submit(folder: Path, env: dict[str, str], name: str, fault: str = "", step_s: float = FAST_S) -> Run:
    folder.mkdir()
    (folder / "logs").mkdir()
    variables = {
        **env,
        **fake_programs(folder, env),
        "ADOPTED": str(ADOPTED),
        "OUT": str(folder / "out"),
        "FAULT": fault,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    run = Run(folder / "run", variables)
    args = ["--pause", str(step_s), *([] if name in SHORT else ["--steps", str(NUM_STEPS)])]
    options = ["--run-dir=run", "--hang-timeout=15", "--checkpoints=out/**/*.pt"]
    run.hpctrain("submit", *options, str(ADOPTED / f"{name}.sbatch"), *args, cwd=folder)
    return run


def runs_of(run: Run) -> list[Run]:
    return [Run(run.dir.task(index).path, run.env) for index in run.dir.tasks()] or [run]


def events(run: Run, kind: str) -> list[dict[str, Any]]:
    return [event for task in runs_of(run) for event in task.events(kind)]


@pytest.mark.parametrize(
    ("name", "disturbance"),
    [
        pytest.param(
            name,
            disturbance,
            marks=pytest.mark.extended if (name, disturbance) in CHEAP else pytest.mark.long,
            id=f"{name}-{disturbance}",
        )
        for name in SCRIPT_NAMES
        for disturbance in (*DISTURBANCES, "raised")[: 5 if name == "plain_srun" else 4]
    ],
)
def test_adopted_script(slurm, tmp_path, name, disturbance):
    fault = {"killed": "8:kill", "hung": "8:hang", "raised": "8:raise"}.get(disturbance, "")
    step_s = SLOW_S if disturbance == "preempted" else FAST_S
    if name == "own_master":
        step_s *= 4  # The supervisor queries Slurm every ten seconds.
    run = submit(tmp_path / "job", slurm.env, name, fault, step_s)
    out = tmp_path / "job/out"
    if disturbance == "preempted":
        wait_for(lambda: [*out.rglob("*.pt"), *out.rglob("*.ckpt")], 200, "a checkpoint")
        preempt(slurm.env)
    assert run.wait(400) == 0, run.describe()
    assert {event["state"] for event in events(run, "finished")} == {"COMPLETED"}
    failures = {event["class"] for event in events(run, "failure")}
    if disturbance == "preempted":
        assert events(run, "requeue"), run.describe()
    if disturbance == "hung":
        assert "hang" in failures
        assert all(os.path.exists(event["log"]) for event in events(run, "failure"))
    if disturbance == "killed":
        # A launcher may only report that its rank has failed.
        assert failures & {"killed", "communication", "python"}
    if disturbance == "raised":
        # srun exits with the code of a peer, which it has stopped.
        assert failures == {"python"}
    if disturbance == "undisturbed":
        assert not failures
    check_result(name, out)
    assert_no_process_left(run.path)


def check_result(name: str, out: Path) -> None:
    results = [(out / file).read_text() for file in RESULTS.get(name, ["result"])]
    if name == "lightning":
        assert results == [f"{NUM_STEPS}\n"]
        return
    for number, result in enumerate(results):
        lr = 0.02 if name == "array" and number == 1 else 0.01
        steps = {"self_requeue": 20, "chain": 10}.get(name, NUM_STEPS)
        assert json.loads(result) == pytest.approx(
            expected_weights(steps, lr, 1 if name == "array" else 2), abs=1e-4
        )


def expected_weights(num_steps: int, lr: float, world_size: int) -> list[float]:
    """Train the model of `train.py` in this process."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        for rank in range(world_size):
            inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(1000 * step + rank))
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            (loss / world_size).backward()
        optimizer.step()
    return model.weight.flatten().tolist()


@pytest.mark.extended
def test_signal_handler_of_a_script_saves_and_requeues(slurm, tmp_path):
    """Slurm sends the signal of `--signal=B:…` to the supervisor, which forwards it to the script only."""
    run = submit(tmp_path / "job", slurm.env, "bash_signal", step_s=SLOW_S)
    out = tmp_path / "job/out"
    wait_for(lambda: (out / "checkpoint.pt").exists(), 200, "a checkpoint")
    job_id = run.events("submitted")[0]["job_id"]
    run_command(["scancel", "--batch", f"--signal={signal.SIGUSR1.name}", job_id], slurm.env)
    assert run.wait(400) == 0, run.describe()
    assert "caught USR1" in (out / "handler").read_text()
    # The script has requeued its job itself.
    assert [event["by"] for event in run.events("requeue")] == ["slurm"]
    assert len(run.events("started")) == 2
    check_result("bash_signal", out)
    output = (tmp_path / "job").glob("slurm-*.out")
    assert "starts after step" in next(output).read_text()


@pytest.mark.extended
def test_ranks_of_a_batch_script_cannot_be_attached_to(tmp_path):
    (tmp_path / "job.sh").write_text("#!/bin/sh\nsleep 100\n")
    run = Run(tmp_path / "run", {})
    run.hpctrain("submit", "--backend=local", "--run-dir=run", "job.sh", cwd=tmp_path)
    wait_for(lambda: run.events("started"), 60, "the start")
    attached = run.hpctrain("attach", str(run.path), "--", "true", check=False)
    assert attached.returncode == 2
    assert "is a batch script, which starts its ranks itself. They run on this machine." in attached.stderr
    run.hpctrain("cancel", str(run.path))
    assert run.wait(100) != 0


@pytest.mark.extended
def test_script_whose_restarts_make_no_progress_ends(tmp_path):
    """Without Slurm: a script that fails in each attempt, with the cause of its last line."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.sh").write_text(
        "#!/bin/sh\n#SBATCH --comment=x --ntasks=4\necho 'no such table' >&2\nexit 3\n"
    )
    run = Run(folder / "run", {})
    run.hpctrain("submit", "--backend=local", "--run-dir=run", "job.sh", cwd=folder)
    assert run.wait(100) == 4
    status = run.status()
    assert "no such table" in status["cause"]
    assert len(run.events("started")) <= 3
    shown = run.hpctrain("status", str(run.path)).stdout
    assert "none: a restart starts over" in shown
    (folder / "job.sh").write_text("#!/bin/sh\n#SBATCH --job-name=other -N 9\ntouch fixed\n")
    sources = run.hpctrain("resume", str(run.path), "--show-config", "--ntasks=2").stdout
    assert re.search(r"^comment +x +previous submission$", sources, re.MULTILINE)
    assert re.search(r"^ntasks +2 +command line$", sources, re.MULTILINE)
    assert not re.search(r"^nodes +9", sources, re.MULTILINE)
    run.hpctrain("resume", str(run.path))
    assert run.wait(100) == 0
    assert (folder / "fixed").exists()


@pytest.mark.extended
def test_requested_requeue_runs_the_script_again_from_its_copy(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    script = folder / "job.sh"
    script.write_text(
        '#!/bin/sh\n#SBATCH --comment=x\necho "$1 in attempt $HPCTRAIN_ATTEMPT" >>seen\n'
        "[ $HPCTRAIN_ATTEMPT = 1 ] || sleep 100\n"
    )
    run = Run(folder / "run", {})
    run.hpctrain("submit", "--backend=local", "--run-dir=run", "job.sh", "argument", cwd=folder)
    wait_for((folder / "seen").exists, 60, "the start of the script")
    script.write_text("#!/bin/sh\nexit 1\n")
    run.hpctrain("requeue", str(run.path))
    assert run.wait(400) == 0, run.describe()
    assert (folder / "seen").read_text() == "argument in attempt 0\nargument in attempt 1\n"


@pytest.mark.extended
def test_script_without_exported_variables_is_observed_but_its_own_jobs_are_not(slurm, tmp_path):
    """The successor continues the run although sbatch exports no variable to it."""
    folder = tmp_path / "job"
    folder.mkdir()
    python = sys.executable
    (folder / "child.py").write_text(
        "import os, pathlib, torch\n"
        "names = [name for name in os.environ if name.startswith('HPCTRAIN_')]\n"
        f"pathlib.Path({str(folder / 'child')!r}).write_text(f'{{sorted(names)}}')\n"
    )
    (folder / "job.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --export=NONE --nodes=1 --ntasks=2 --time=20 --no-requeue\n"
        f"[ -e child ] || sbatch --export=ALL --wait --output=/dev/null --wrap='{python} child.py'\n"
        "export MASTER_ADDR=$(hostname) MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000)) GLOO_SOCKET_IFNAME=lo\n"
        "export SLURM_EXPORT_ENV=$SLURM_EXPORT_ENV,MASTER_ADDR,MASTER_PORT,GLOO_SOCKET_IFNAME\n"
        f"srun {python} {ADOPTED / 'train.py'} --out out --steps 30 --pause {SLOW_S}\n"
        "echo trained >>ends\n"
    )
    run = Run(folder / "run", slurm.env)
    run.hpctrain("submit", "--run-dir=run", "--checkpoints=out/*.pt", "job.sbatch", cwd=folder)
    wait_for((folder / "out/checkpoint.pt").exists, 200, "a checkpoint")
    preempt(slurm.env)
    assert run.wait(400) == 0, run.describe()
    assert (folder / "child").read_text() == "[]"
    # Not after the preemption.
    assert (folder / "ends").read_text() == "trained\n"
    check_result("", folder / "out")
    # Observed ranks stop after the same step, and a successor continues the run.
    assert "all ranks exit after step" in "".join(path.read_text() for path in folder.glob("slurm-*.out"))
    assert len({event["job_id"] for event in run.events("submitted")}) == 2
    report = json.loads(run.hpctrain("report", str(run.path), "--json").stdout)
    first, second = report["attempts"]
    assert [attempt["world_size"] for attempt in (first, second)] == [2, 2]
    assert (first["first_step"], second["first_step"], second["last_step"]) == (
        1,
        second["resumed_step"] + 1,
        30,
    )
    checkpoint = str(folder / "out/checkpoint.pt")
    assert [saved["path"] for saved in report["script_checkpoints"]] == [checkpoint]
    assert run.hpctrain("checkpoints", str(run.path)).stdout.endswith(f"{checkpoint}\n")


def run_script(folder: Path, lines: str, files: dict[str, str], *options: str) -> Run:
    """Run a batch script without Slurm to its end; `python` is the interpreter of the tests."""
    folder.mkdir(exist_ok=True)
    for name, text in {**files, "job.sh": f"#!/bin/sh\n{lines}\n"}.items():
        (folder / name).write_text(text)
    run = Run(folder / "run", {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})
    run.hpctrain("submit", "--backend=local", "--run-dir=run", *options, "job.sh", cwd=folder)
    run.wait(100)
    return run


CRASH = "import torch\nraise RuntimeError('the data are broken')\n"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("end", "cause"),
    [
        ("exit 0", None),
        pytest.param("exit 3", "exit code 3", marks=pytest.mark.long),
        # That of the server, which would be 143 without hpctrain.
        ("", "the batch script exited with code 75, which requests a continuation, although nothing stopped"),
    ],
)
def test_script_that_ends_its_own_server_ends(tmp_path, end, cause):
    """The signal of the script is no request to stop the run, although the server is observed."""
    server = "import time, torch\nopen('up', 'w').close()\ntime.sleep(100)\n"
    lines = f"python server.py &\nwhile [ ! -e up ]; do sleep 0.1; done\nsleep 1; kill $!; wait $!\n{end}"
    run = run_script(tmp_path, lines, {"server.py": server}, "--max-failures=1")
    status = run.status()
    assert status["state"] == ("FAILED" if cause else "COMPLETED"), run.describe()
    assert (cause or "") in (status["cause"] or "")
    assert len(run.events("started")) == 1


@pytest.mark.extended
@pytest.mark.parametrize(
    "lines", ["python crash.py | cat", "python -c 'import torch'; python crash.py; echo done"]
)
def test_crash_that_the_exit_code_hides_is_a_failure(tmp_path, lines):
    run = run_script(tmp_path, lines, {"crash.py": CRASH})
    status = run.status()
    assert status["state"] == "FAILED", run.describe()
    assert "RuntimeError: the data are broken" in status["cause"]


@pytest.mark.extended
def test_worker_of_torchrun_that_was_killed_is_named(tmp_path):
    """Its peer only reports a lost connection."""
    script = (
        "import os, signal, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "dist.all_reduce(torch.ones(1))\n"
    )
    torchrun = "torchrun --standalone --nproc-per-node=2 train.py"
    run = run_script(tmp_path / "job", torchrun, {"train.py": script}, "--max-failures=1")
    (failure,) = run.events("failure")
    assert (failure["rank"], failure["class"]) == (1, "killed")
    assert "SIGKILL" in failure["cause"]


@pytest.mark.extended
def test_crash_that_the_script_survived_is_noted(tmp_path):
    run = run_script(tmp_path, "python crash.py || true\npython -c 'import torch'", {"crash.py": CRASH})
    status = run.status()
    assert status["state"] == "COMPLETED", run.describe()
    assert re.fullmatch(
        r"rank 0 on \S+: RuntimeError: the data are broken, but the batch script exited with code 0",
        status["note"],
    )
    assert "the data are broken" in run.hpctrain("report", str(run.path), "-o", "-").stdout
    assert "the data are broken" in run.hpctrain("logs", "--errors", str(run.path)).stdout
    complete = run.hpctrain("resume", str(run.path), check=False)
    assert "To run the script again, submit it with --run-dir" in complete.stderr


@pytest.mark.extended
def test_failure_that_the_script_survived_is_not_the_cause_of_another(tmp_path):
    lines = "python crash.py || true\npython -c 'import torch'\necho 'no such table' >&2\nexit 3"
    run = run_script(tmp_path, lines, {"crash.py": CRASH}, "--max-failures=1")
    cause = run.status()["cause"]
    assert "no such table" in cause, run.describe()
    assert "the data are broken" not in cause


@pytest.mark.extended
def test_scripts_of_a_local_array_have_their_task(tmp_path):
    run_script(tmp_path, "touch task-$SLURM_ARRAY_TASK_ID", {}, "--array=2,5%2")
    assert sorted(path.name for path in tmp_path.glob("task-*")) == ["task-2", "task-5"]


@pytest.mark.extended
@pytest.mark.parametrize(("directive", "num_jobs"), [("--requeue", 1), ("--no-requeue", 2)])
def test_script_that_loses_a_node_continues_on_others(slurm, free_nodes, tmp_path, directive, num_jobs):
    """Slurm requeues the job itself, or kills it five seconds later, so the run continues in another job."""
    script = (ADOPTED / "plain_srun.sbatch").read_text()
    (tmp_path / "loses.sbatch").write_text(script.replace("#SBATCH", f"#SBATCH {directive}\n#SBATCH", 1))
    run = submit(tmp_path / "job", slurm.env, str(tmp_path / "loses"), step_s=SLOW_S)
    out = tmp_path / "job/out"
    wait_for(lambda: (out / "checkpoint.pt").exists(), 200, "a checkpoint")
    victim = run.events("started")[0]["hosts"][1]
    slurm.kill_node(victim)
    assert run.wait(400) == 0, run.describe()
    (failure,) = run.events("failure")
    assert (failure["class"], failure["host"]) == ("node-lost", victim)
    assert len(run.events("submitted")) == num_jobs
    assert victim not in run.events("started")[-1]["hosts"]
    assert run.events("resumed")[-1]["step"] > 0
    check_result("plain_srun", out)
    assert_no_process_left(run.path)


@pytest.mark.extended
def test_files_of_the_ranks_are_their_logs(slurm, tmp_path):
    """A hang names the file of the guilty rank, to which the next attempt appends."""
    folder = tmp_path / "job"
    folder.mkdir()
    train = f"{sys.executable} {ADOPTED / 'train.py'} --steps {NUM_STEPS} --pause {FAST_S} --out out"
    (folder / "job.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --time=20\n"
        "export GLOO_SOCKET_IFNAME=lo MASTER_PORT=$((20000 + $$ % 10000))\n"
        "export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\n"
        f"srun --open-mode=append --output=rank-%t.log {train} --fault 8:hang\n"
    )
    run = Run(folder / "run", slurm.env)
    options = ["--run-dir=run", "--hang-timeout=15", "--checkpoints=out/*.pt"]
    run.hpctrain("submit", *options, "job.sbatch", cwd=folder)
    assert run.wait(400) == 0, run.describe()
    (failure,) = run.events("failure")
    assert (failure["class"], failure["rank"]) == ("hang", 1)
    assert os.path.realpath(failure["log"]) == str(folder / "rank-1.log")
    for attempt, step in enumerate((0, 5)):
        for rank in range(2):
            shown = run.hpctrain("logs", str(run.path), f"--attempt={attempt}", f"--rank={rank}").stdout
            starts = [line for line in shown.splitlines() if "starts after step" in line]
            assert starts == [f"rank {rank} of 2 starts after step {step}"]
    merged = run.hpctrain("logs", str(run.path)).stdout.splitlines()
    assert {f"[{rank}] rank {rank} of 2 starts after step 5" for rank in range(2)} <= set(merged)


@pytest.mark.extended
def test_each_node_of_several_groups_is_measured(slurm, tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.sbatch").write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=2 --time=20\nfor fold in 0 1; do\n"
        f"    srun --nodes=1 --ntasks=2 --exact {sys.executable} -c 'import time, torch; time.sleep(100)' &\n"
        "done\nwait\n"
    )
    run = Run(folder / "run", slurm.env)
    run.hpctrain("submit", "--run-dir=run", "job.sbatch", cwd=folder)
    wait_for(lambda: len(run.dir.all_telemetry()) == 2, 200, "the measurements of both nodes")
    hosts = [{record["host"] for record in read_json_lines(path)} for path in run.dir.all_telemetry()]
    assert hosts == [{host} for host in run.events("started")[0]["hosts"]]
    unknown = run.hpctrain("logs", str(run.path), "--rank=1", check=False)
    assert "use srun --output=rank-%t.log or --label" in unknown.stderr
    run.hpctrain("cancel", str(run.path))
    run.wait(200)


@pytest.mark.extended
def test_output_files_are_those_of_sbatch(slurm, tmp_path):
    (tmp_path / "job.sbatch").write_text(
        "#!/bin/bash\n#SBATCH -N2 -n2 --output=%x.out --error=%x.err\n"
        'echo "$1 in $PWD"; echo warning >&2\n'
        "srun --label sh -c 'echo task $SLURM_PROCID; echo error $SLURM_PROCID >&2'\n"
        f"srun -n1 {sys.executable} -c 'import torch; print(torch.ones(2).sum())'\n"
        "(sleep 0.2; printf 'no newline') &\nwait\n"
    )
    run_command(["sbatch", "--wait", "--job-name=plain", "job.sbatch", "hello"], slurm.env, cwd=tmp_path)
    run = Run(tmp_path / "run", slurm.env)
    run.hpctrain("submit", "--run-dir=run", "--name=adopted", "job.sbatch", "hello", cwd=tmp_path)
    assert run.wait(200) == 0, run.describe()
    for kind in ("out", "err"):
        plain, adopted = (
            sorted((tmp_path / f"{name}.{kind}").read_text().splitlines()) for name in ("plain", "adopted")
        )
        assert adopted == plain
        assert len(plain) > 2
