"""The hook in the Python processes of a command, in environments that differ from that of the ranks."""

import json
import os
import queue
import signal
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from hpctrain.cluster import detect
from hpctrain.files import read_json_lines
from hpctrain.rundir import ATTEMPT_VARIABLE, CHILD_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.program import process_observer
from hpctrain.runtime.program.process_observer import ChildRelay, ProcessObserver
from hpctrain.supervisor.workers import batch_launcher
from hpctrain.supervisor.workers.heartbeat_server import HeartbeatServer


@pytest.fixture
def variables(tmp_path, monkeypatch) -> dict[str, str]:
    """Variables of a command whose PYTHONPATH has modules of the user."""
    (tmp_path / "sitecustomize.py").write_text("print('customized')\n")
    (tmp_path / "torch.py").write_text("print('imported', __name__)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    ranks = detect({})
    worker = ProcessObserver(RunDir(tmp_path), 0, ranks, ranks.torch_variables(), records_steps=False)
    return ChildRelay(worker).variables


PRINT_PATHS = "import os, sys, torch; print(os.environ['PYTHONPATH'].split(os.pathsep), sys.path)"


def run(
    python: str | Path, variables: dict[str, str], script: str = PRINT_PATHS
) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run([python, "-c", script], env=environ, capture_output=True, text=True, timeout=120)


def test_environment_without_hpctrain_runs_the_users_sitecustomize(tmp_path, variables):
    venv.create(tmp_path / "venv", with_pip=False)
    result = run(tmp_path / "venv/bin/python", variables)
    assert (result.returncode, result.stderr) == (0, "")
    customized, imported, paths = result.stdout.splitlines()
    assert (customized, imported) == ("customized", "imported torch")
    hook = variables["PYTHONPATH"].split(os.pathsep)[0]
    assert paths.count(hook) == 1, "children inherit the hook, but it is not searched for modules"


def test_hpctrain_for_a_newer_python_does_not_break_the_program(tmp_path, variables):
    (tmp_path / "hpctrain").mkdir()
    (tmp_path / "hpctrain/__init__.py").write_text("syntax of a newer version")
    venv.create(tmp_path / "venv", with_pip=False)
    # Without the working directory.
    result = run(tmp_path / "venv/bin/python", variables, "import sys; del sys.path[0]; import torch")
    assert result.returncode == 0
    assert result.stderr.startswith("hpctrain: cannot monitor this process: SyntaxError(")


def test_process_of_another_job_is_not_observed(tmp_path, variables):
    told = {"socket": "ended", "ranks": json.loads(variables["HPCTRAIN_COMMAND"])["ranks"]}
    script = "import signal, threading, torch; print(signal.getsignal(15), threading.active_count())"
    environ = {
        **variables,
        "HPCTRAIN_COMMAND": json.dumps(told),
        "HPCTRAIN_RUN_DIR": str(tmp_path),
        "HPCTRAIN_ATTEMPT": "0",
        "RANK": "0",
        "WORLD_SIZE": "1",
    }
    result = run(sys.executable, environ, script)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith(f"{signal.SIG_DFL} 1\n")


def test_only_the_first_helper_that_trains_is_observed(monkeypatch):
    """A launcher may import torch before it starts the training, and torch may spawn several ranks."""
    launch = [monkeypatch.delenv(name, raising=False) for name in process_observer._LAUNCH_VARIABLES]
    hooks, steps = [], []
    monkeypatch.setattr(process_observer, "install_step_hook", lambda hook, is_restart: hooks.append(hook))
    monkeypatch.setenv(CHILD_VARIABLE, json.dumps({"launch": launch, "pid": os.getppid()}))
    monkeypatch.setenv(ATTEMPT_VARIABLE, "0")
    for name in ("first", "second"):
        monkeypatch.setattr(process_observer, "_claims", {})  # as in another process
        monkeypatch.setattr(process_observer, "_observe", lambda *_, name=name: lambda: steps.append(name))
        process_observer.observe_process()
        claims = process_observer._claims
        assert not claims, "a helper that does not train is not observed"
        hooks[-1]()
        hooks[-1]()
        if name == "first":
            (claim,) = claims.values()
    assert steps == ["first", "first"]
    claim.close()


def test_job_that_a_batch_script_submits_does_not_inherit_the_run(tmp_path, variables):
    names = ["HPCTRAIN_COMMAND", "HPCTRAIN_RUN_DIR", "HPCTRAIN_SUPERVISOR_ADDRESS"]
    command = json.dumps({"job": "7", "variables": names})
    environ = {
        **variables,
        "HPCTRAIN_TELEMETRY": "0",
        **dict.fromkeys(names, "x"),
        "HPCTRAIN_COMMAND": command,
    }
    script = "import os; print(sorted(name for name in os.environ if name.startswith('HPCTRAIN_')))"
    for job, left in (("7", sorted([*names, "HPCTRAIN_TELEMETRY"])), ("8", ["HPCTRAIN_TELEMETRY"])):
        result = run(sys.executable, {**environ, "SLURM_JOB_ID": job}, script)
        assert result.stdout.splitlines()[-1] == str(left)


class Joined:
    """A supervisor that records the introductions of observed processes."""

    def __init__(self) -> None:
        self.introductions: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
        self.newest_step = 0

    def on_join(self, attempt, introduction) -> int:
        self.introductions.put({**introduction, "attempt": attempt})
        return 0

    def on_message(self, attempt, rank, message) -> None:
        self.newest_step = max(self.newest_step, message.get("step") or 0)

    def on_disconnect(self, attempt, rank) -> None: ...

    def on_tick(self) -> None: ...


def batch_variables(folder: Path, packages: list[str]) -> dict[str, str]:
    """Variables of a process of a batch script, rank 0 of a torchrun on the second node of the job."""
    (folder / "torch.py").touch()
    hook = Path(process_observer.__file__).with_name("startup_hook")
    launch = {"TORCHELASTIC_RUN_ID": "r", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0"}
    launch |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    launch |= {"GROUP_WORLD_SIZE": "1", "SLURMD_NODENAME": "n7", "SLURM_JOB_NODELIST": "n[6-7]"}
    return {
        **launch,
        RUN_DIR_VARIABLE: str(folder),
        ATTEMPT_VARIABLE: "3",
        CHILD_VARIABLE: json.dumps({"packages": packages, "step": None, "python": "3.98.7"}),
        "PYTHONPATH": os.pathsep.join([str(hook), str(folder)]),
        "PYTHONSAFEPATH": "1",  # without the working directory
    }


@pytest.mark.slow
def test_process_of_a_batch_script_reports_from_an_environment_without_hpctrain(tmp_path):
    """The environment of the script has PyTorch, but not hpctrain and its dependencies."""
    venv.create(tmp_path / "venv", with_pip=False)
    supervisor, telemetry = Joined(), RunDir(tmp_path).telemetry(1)
    variables = batch_variables(tmp_path, batch_launcher._PACKAGES)
    script = (
        "import pathlib, sys, time, torch\n"
        f"while not pathlib.Path({str(telemetry)!r}).exists(): time.sleep(0.05)\n"
        "print('sampled')"
    )
    with HeartbeatServer("127.0.0.1", supervisor) as server, open(tmp_path / "rank.log", "w") as log:
        result = subprocess.run(
            [tmp_path / "venv/bin/python", "-c", script],
            env={"PATH": os.environ["PATH"], **server.variables, **variables},
            stdout=log,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
        assert (result.returncode, result.stderr) == (0, "")
        introduction = supervisor.introductions.get(timeout=10)
    assert introduction == {
        "attempt": 3,
        "rank": 0,
        "world_size": 2,
        "group": "torchrun/127.0.0.1:29500",
        "host": "n7",
        "in_step": False,
        "outputs": [[str(tmp_path / "rank.log"), 0]],
    }
    assert {record["host"] for record in read_json_lines(telemetry)} == {"n7"}


def test_process_with_another_version_of_python_says_once_that_it_is_not_observed(tmp_path):
    packages = tmp_path / "packages/hpctrain"
    packages.mkdir(parents=True)
    (packages / "__init__.py").write_text("syntax of a newer version")
    venv.create(tmp_path / "venv", with_pip=False)
    variables = batch_variables(tmp_path, [str(packages.parent)])
    children = "import subprocess, sys, torch; subprocess.run([sys.executable, '-c', 'import torch'])"
    result = run(tmp_path / "venv/bin/python", variables, children)
    assert result.returncode == 0
    (line,) = result.stderr.splitlines()
    assert line.startswith("hpctrain: cannot monitor this process: ")
    assert "and the supervisor has Python 3.98.7 (SyntaxError(" in line
    assert run(tmp_path / "venv/bin/python", {**variables, "LOCAL_RANK": "1"}, children).stderr == ""


TRAINS = """
import time, torch
layer = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
time.sleep(1.5)
print(torch.__version__)
"""


@pytest.mark.extended
def test_process_with_an_older_torch_reports_its_steps_from_an_environment_without_hpctrain(tmp_path):
    """The environment is one of `make test-torch-versions`, whose .pth files are not read."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    packages = cache / "hpctrain-torch/2.6.0/lib/python{}.{}/site-packages".format(*sys.version_info)
    if not packages.exists():
        pytest.skip(f"needs {packages}, which `make test-torch-versions` creates")
    venv.create(tmp_path / "venv", with_pip=False)
    (installed,) = tmp_path.glob("venv/lib/python*/site-packages")
    (installed / "torch.pth").write_text(f"{packages}\n")
    python, supervisor = tmp_path / "venv/bin/python", Joined()
    variables = {**batch_variables(tmp_path, batch_launcher._PACKAGES), "HPCTRAIN_TELEMETRY": "0"}
    (tmp_path / "torch.py").unlink()
    alone = run(python, {"PYTHONSAFEPATH": "1"}, "import torch, hpctrain")
    assert "No module named 'hpctrain'" in alone.stderr
    with HeartbeatServer("127.0.0.1", supervisor) as server:
        result = run(python, {**server.variables, **variables}, TRAINS)
    assert result.stdout.startswith("2.6.0"), result.stderr
    assert "hpctrain: " not in result.stderr
    assert supervisor.newest_step == 3
