"""Batch scripts shaped after the documentation of clusters, submitted as they are, and disturbed.

The container runtime and conda are fakes. The scripts train a small model that saves and resumes itself, so
the weights of a disturbed run equal those of an undisturbed one.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Sequence
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
#: Files with the results of a script, if there are several.
RESULTS = {"array": ["0/result", "1/result"], "several_steps": ["0/result", "1/result"]}
#: Events of a script, or of each task of its array, after a disturbance: a failure with its class and rank,
#: and a requeue with its class, or by Slurm's command.
OUTCOMES = {
    ("plain_srun", "undisturbed"): "completed",
    ("plain_srun", "preempted"): "requeue:preempted resumed completed",
    ("plain_srun", "killed"): "failure:killed:1 restart resumed completed",
    ("plain_srun", "hung"): "failure:hang:1 restart resumed completed",
    ("plain_srun", "raised"): "failure:python:1 restart resumed completed",
    ("torchrun", "undisturbed"): "completed",
    ("torchrun", "preempted"): "requeue:preempted resumed completed",
    ("torchrun", "killed"): "failure:killed:1 restart resumed completed",
    ("torchrun", "hung"): "failure:hang:1 restart resumed completed",
    ("several_steps", "undisturbed"): "completed",
    ("several_steps", "preempted"): "requeue:preempted resumed completed",
    # One training may be killed when the other has not come so far.
    ("several_steps", "killed"): "(failure:killed:1 restart resumed )+completed",
    ("several_steps", "hung"): "failure:hang:1 restart resumed completed",
    # The script requeues its job after ten steps.
    ("self_requeue", "undisturbed"): "requeue:slurm resumed completed",
    ("self_requeue", "preempted"): "requeue:preempted resumed requeue:slurm resumed completed",
    ("self_requeue", "killed"): "failure:killed:1 restart resumed requeue:slurm resumed completed",
    ("self_requeue", "hung"): "failure:hang:1 restart resumed requeue:slurm resumed completed",
    ("accelerate", "undisturbed"): "completed",
    ("accelerate", "preempted"): "requeue:preempted resumed completed",
    ("accelerate", "killed"): "failure:killed:1 restart resumed completed",
    ("accelerate", "hung"): "failure:hang:1 restart resumed completed",
    ("lightning", "undisturbed"): "completed",
    ("lightning", "preempted"): "requeue:preempted resumed completed",
    ("lightning", "killed"): "failure:killed:1 restart resumed completed",
    ("lightning", "hung"): "failure:hang:1 restart resumed completed",
    ("array", "undisturbed"): "completed",
    ("array", "preempted"): "requeue:preempted resumed completed",
    ("array", "killed"): "failure:killed:0 restart resumed completed",
    ("array", "hung"): "failure:hang:0 restart resumed completed",
    ("container", "undisturbed"): "completed",
    ("container", "preempted"): "requeue:preempted resumed completed",
    ("container", "killed"): "failure:killed:1 restart resumed completed",
    ("container", "hung"): "failure:hang:1 restart resumed completed",
    ("conda", "undisturbed"): "completed",
    ("conda", "preempted"): "requeue:preempted resumed completed",
    ("conda", "killed"): "failure:killed:1 restart resumed completed",
    ("conda", "hung"): "failure:hang:1 restart resumed completed",
    ("bash_signal", "undisturbed"): "completed",
    ("bash_signal", "preempted"): "requeue:preempted resumed completed",
    ("bash_signal", "killed"): "failure:killed:1 restart resumed completed",
    ("bash_signal", "hung"): "failure:hang:1 restart resumed completed",
    ("chain", "undisturbed"): "completed",
    ("chain", "preempted"): "requeue:preempted resumed completed",
    ("chain", "killed"): "failure:killed:1 restart resumed completed",
    ("chain", "hung"): "failure:hang:1 restart resumed completed",
    ("own_master", "undisturbed"): "completed",
    ("own_master", "preempted"): "requeue:preempted resumed completed",
    ("own_master", "killed"): "failure:killed:1 restart resumed completed",
    ("own_master", "hung"): "failure:hang:1 restart resumed completed",
}
#: Scripts that `make test-slurm-versions` runs with each version of Slurm.
COMMON = ("plain_srun", "torchrun", "several_steps", "self_requeue")
#: Steps of scripts that set their number.
NUM_STEPS_OF = {"self_requeue": 20, "chain": 10}
FAULTS = {"killed": "8:kill", "hung": "8:hang", "raised": "8:raise"}
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


def submit(
    folder: Path,
    env: dict[str, str],
    name: str,
    fault: str = "",
    step_s: float = FAST_S,
    *,
    options: Sequence[str] = (),
    out: Path | None = None,
) -> Run:
    """Submit a script in a new folder; `out` is that of its checkpoints and results."""
    out = out or folder / "out"
    folder.mkdir()
    (folder / "logs").mkdir()
    variables = {
        **env,
        **fake_programs(folder, env),
        "ADOPTED": str(ADOPTED),
        "OUT": str(out),
        "FAULT": fault,
        "GLOO_SOCKET_IFNAME": "lo",
    }
    run = Run(folder / "run", variables)
    args = ["--pause", str(step_s), *([] if name in NUM_STEPS_OF else ["--steps", str(NUM_STEPS)])]
    suffix = "ckpt" if name == "lightning" else "pt"
    options = ["--run-dir=run", "--hang-timeout=15", f"--checkpoints={out}/**/*.{suffix}", *options]
    run.hpctrain("submit", *options, str(ADOPTED / f"{name}.sbatch"), *args, cwd=folder)
    return run


def runs_of(run: Run) -> list[Run]:
    return [Run(run.dir.task(index).path, run.env) for index in run.dir.tasks()] or [run]


def outcome(run: Run) -> str:
    """Describe the events of a run in their order, as the table does."""
    words = []
    for event in read_json_lines(run.dir.events):
        match event["kind"]:
            case "failure":
                words.append(f"failure:{event['class']}:{event['rank']}")
            case "requeue":
                words.append(f"requeue:{event.get('class', event['by'])}")
            case "restart" | "resumed":
                words.append(event["kind"])
            case "finished":
                words.append(event["state"].lower())
    return " ".join(words)


def rows(*, common: bool) -> list[Any]:
    """Return the rows of the table as parameters of a test."""
    return [
        pytest.param(*row, marks=pytest.mark.extended if row in CHEAP else pytest.mark.long, id="-".join(row))
        for row in OUTCOMES
        if (row[0] in COMMON) == common
    ]


@pytest.mark.parametrize(("name", "disturbance"), rows(common=True))
def test_adopted_script(slurm, tmp_path, name, disturbance):
    check_row(slurm.env, tmp_path / "job", name, disturbance)


@pytest.mark.parametrize(("name", "disturbance"), rows(common=False))
def test_rarer_adopted_script(slurm, tmp_path, name, disturbance):
    check_row(slurm.env, tmp_path / "job", name, disturbance)


def check_row(env: dict[str, str], folder: Path, name: str, disturbance: str) -> None:
    """Disturb a script, and fail unless it ends as its row of the table says."""
    step_s = SLOW_S if disturbance == "preempted" else FAST_S
    if name == "own_master" or (disturbance == "preempted" and name in NUM_STEPS_OF):
        # The supervisor queries Slurm every ten seconds; few steps may end before Slurm preempts the job.
        step_s *= 4
    run = submit(folder, env, name, fault=FAULTS.get(disturbance, ""), step_s=step_s)
    out = folder / "out"
    if disturbance == "preempted":
        wait_for(lambda: num_saved(out) == len(RESULTS.get(name, [""])), 200, "a checkpoint of each training")
        preempt(env)
    assert run.wait(400) == 0, run.describe()
    for task in runs_of(run):
        assert re.fullmatch(OUTCOMES[name, disturbance], outcome(task)), run.describe()
        # A script that starts over would end with the same weights.
        assert all(event["is_loaded"] and event["step"] > 0 for event in task.events("resumed"))
        assert [*read_json_lines(task.dir.metrics)][-1]["step"] == NUM_STEPS_OF.get(name, NUM_STEPS)
        for failure in task.events("failure"):
            check_failure(task, failure, disturbance)
    check_result(name, out)
    assert_no_process_left(run.path)


def check_failure(run: Run, failure: dict[str, Any], disturbance: str) -> None:
    """Fail unless a failure is explained."""
    assert os.path.exists(failure["log"])
    match disturbance:
        case "killed":
            assert failure["class"] != "killed" or "SIGKILL" in failure["cause"]
        case "raised":
            assert "RuntimeError: the data are broken" in failure["cause"]
        case "hung":
            assert f"rank {failure['rank']} on {failure['host']} is in disturb (train.py" in failure["cause"]
            assert "in disturb" in run.dir.stacks(failure["attempt"], failure["rank"]).read_text()


def num_saved(out: Path) -> int:
    """Return the number of folders with checkpoints."""
    return len({path.parent for path in (*out.rglob("*.pt"), *out.rglob("*.ckpt"))})


def check_result(name: str, out: Path, num_steps: int | None = None) -> None:
    """Fail unless the weights are those of an undisturbed training."""
    num_steps = num_steps or NUM_STEPS_OF.get(name, NUM_STEPS)
    for number, file in enumerate(RESULTS.get(name, ["result"])):
        lr = 0.02 if name == "array" and number == 1 else 0.01
        expected = expected_weights(num_steps, lr, 1 if name == "array" else 2)
        assert json.loads((out / file).read_text()) == pytest.approx(expected, abs=1e-4)


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
def test_script_continues_after_its_time_limit(slurm, tmp_path):
    """Slurm sends the signal up to a minute early, so the first attempts may stop before they train."""
    options = ["--time=1", "--stop-before-limit=40"]
    run = submit(tmp_path / "job", slurm.env, "plain_srun", step_s=0.8, options=options)
    assert run.wait(400) == 0, run.describe()
    assert {event["class"] for event in run.events("requeue")} == {"time-limit"}
    assert not run.events("failure")
    assert run.events("resumed")[-1]["step"] > 0
    check_result("plain_srun", tmp_path / "job/out")


@pytest.mark.extended
def test_second_link_of_a_chain_waits_across_a_requeue_and_continues(slurm, tmp_path):
    out = tmp_path / "out"
    first, second = (
        submit(tmp_path / name, slurm.env, "chain", step_s=1, out=out) for name in ("first", "second")
    )
    wait_for((out / "checkpoint.pt").exists, 200, "a checkpoint")
    preempt(slurm.env)
    assert first.wait(400) == 0, first.describe()
    assert second.wait(400) == 0, second.describe()
    assert [event["class"] for event in first.events("requeue")] == ["preempted"]
    assert len(second.events("started")) == 1
    assert second.events("started")[0]["time"] > first.events("finished")[0]["time"]
    assert [event["step"] for event in second.events("resumed")] == [10]
    check_result("chain", out, num_steps=20)


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


#: Trains 20 steps. `NAME FAULT`: in the first attempt, the fault occurs after ten steps.
TRAIN = """
import os, signal, sys, time, torch
name, fault = sys.argv[1:]
layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.Adam(layer.parameters())
for step in range(20):
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    if step == 10 and fault != "none":
        time.sleep(2)  # until the supervisor has received the steps
        if fault == "leave":
            os._exit(0)
        if os.environ["HPCTRAIN_ATTEMPT"] == "0":
            if fault == "raise":
                raise ValueError("bad sample")
            os.kill(os.getpid(), getattr(signal, fault))
open(f"{name}.pt", "w").close()
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    ("lines", "kinds"),
    [
        ("python train.py a SIGKILL\necho finished", ["killed"]),
        ("python train.py a SIGSEGV\npython -c 'import torch'\necho finished", ["signal"]),
        ("python train.py a raise\npython -c 'import torch'\necho finished", ["python"]),
        ("python train.py a none & python train.py b SIGKILL & wait", ["killed"]),
        # It has trained again, so the script accepts the failure.
        ("python train.py a SIGKILL\npython train.py b none", []),
        ("python train.py a leave\necho finished", []),
    ],
)
def test_training_whose_failure_later_lines_hide_starts_again(tmp_path, lines, kinds):
    run = run_script(tmp_path, lines, {"train.py": TRAIN})
    assert run.status()["state"] == "COMPLETED", run.describe()
    assert [event["class"] for event in run.events("failure")] == kinds
    assert len(run.events("started")) == 1 + len(kinds)
    if kinds:
        assert (tmp_path / "a.pt").exists()


@pytest.mark.extended
def test_ranks_of_a_script_that_train_alone_are_noted(tmp_path):
    launch = "RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=2 python train.py a none"
    run = run_script(tmp_path, f"for rank in 0 1; do {launch} & done; wait", {"train.py": TRAIN})
    assert run.status()["state"] == "COMPLETED", run.describe()
    printed = run.hpctrain("logs", str(run.path)).stdout
    assert (
        printed.count("hpctrain: The run has 2 ranks, but rank 0 completed 20 optimizer steps without") == 1
    )


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
