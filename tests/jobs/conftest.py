"""A fake supervisor, to test submission and its ends separately."""

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import environment
from helpers.fake_slurm import FakeSlurm

from hpctrain.jobs.submit.prepare import PreparedSubmission, prepare_submission
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.sandbox import Sandbox

_SUPERVISOR = """#!{python}
import json, os, signal, sys, time
from pathlib import Path
sys.path[:0] = {path!r}
from hpctrain.rundir import RunDir
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.records.run_record import read_run_record
from hpctrain.supervisor.acquire_run import run_of_this_job
from hpctrain.supervisor.job_control import LocalJobControl

assert sys.argv[1:3] == ["-m", "hpctrain.supervisor"], sys.argv
run = run_of_this_job(RunDir(Path(sys.argv[3])), os.environ)
spec = load_spec(run.spec)
if spec.array is not None:
    # Only the tasks of an array pretend.
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
# As the real supervisor, it waits until its submission is recorded.
job_id, deadline = LocalJobControl(spec, os.environ).job_id, time.monotonic() + 60
while read_run_record(run).job_id != job_id and time.monotonic() < deadline:
    time.sleep(0.01)
seen = {{"argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ)}}
(run.path / "seen.json").write_text(json.dumps(seen))
attempt = len(run.attempts())
run.attempt_logs(attempt).mkdir(parents=True)
log = run.rank_log(attempt, 0)

def end(state, **more):
    run.log_event("finished", attempt, state=state, **more)
    sys.exit(0 if state == "COMPLETED" else 1)

signal.signal(signal.SIGTERM, lambda *_: end("CANCELLED", exit_code=143))
run.log_event("started", attempt, nodes=spec.nodes, world_size=spec.world_size, hosts=[])
log.write_text(f"hello from attempt {{attempt}}\\n")
match spec.args:
    case ("sleep",):
        time.sleep(60)
    case ("meet", count):
        begin = spec.array_task - spec.array_task % int(count)
        others = [RunDir(run.path.parent).task(task) for task in range(begin, begin + int(count))]
        deadline = time.monotonic() + 120
        while not all(other.attempts() for other in others) and time.monotonic() < deadline:
            time.sleep(0.01)
    case ("vanish",):
        sys.exit(9)
    case ("vanish-1",):
        if spec.array_task == 1:
            sys.exit(9)
    case ("fail",):
        run.log_event("failure", attempt, rank=3, host="n1", cause="RuntimeError: boom", log=str(log))
        end("FAILED", exit_code=1, cause="rank 3 crashed: RuntimeError: boom")
    case ("twice",):
        run.log_event("restart", attempt)
        attempt += 1
        run.attempt_logs(attempt).mkdir()
        run.log_event("started", attempt, nodes=spec.nodes, world_size=spec.world_size, hosts=[])
        run.rank_log(attempt, 0).write_text(f"hello from attempt {{attempt}}\\n")
with open(run.metrics, "a") as metrics:
    metrics.write(json.dumps({{"step": 7, "epoch": 0, "loss": 0.5}}) + "\\n")
end("COMPLETED", exit_code=0)
"""


@pytest.fixture(scope="session")
def fake_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose supervisor does what the script's only argument says."""
    path = tmp_path_factory.mktemp("python") / "fake-python"
    path.write_text(_SUPERVISOR.format(python=sys.executable, path=sys.path))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def fake_interpreter(fake_python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Submissions of this process use the fake interpreter, and see the environment of a command."""
    monkeypatch.setattr(sys, "executable", fake_python)
    variables = environment()
    for name in os.environ.keys() - variables.keys():
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def environ(slurm: Sandbox) -> dict[str, str]:
    """Variables of commands that use the shared cluster."""
    return environment(slurm.env)


@pytest.fixture
def fake_slurm(tmp_path: Path) -> FakeSlurm:
    """Fake Slurm commands."""
    folder = tmp_path / "bin"
    folder.mkdir()
    return FakeSlurm(folder)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


@pytest.fixture
def prepared(tmp_path: Path, script: Path, fake_python: str) -> Callable[..., PreparedSubmission]:
    """`prepare_submission` with the local backend and other defaults."""

    def call(*args: str, environ: Mapping[str, str] | None = None, **options: Any) -> PreparedSubmission:
        options.setdefault("backend", "local")
        if "script" not in options:
            # The usual script lies in no repository, which would add a note each time.
            options.setdefault("code_snapshot", False)
        return prepare_submission(
            options.pop("script", script),
            args,
            options,
            environ=environment() if environ is None else environ,
            cwd=options.pop("cwd", tmp_path),
            python=options.pop("python", fake_python),
        )

    return call


@pytest.fixture
def make_spec() -> Callable[..., JobSpec]:
    """`JobSpec` with defaults."""

    def call(**fields: Any) -> JobSpec:
        defaults: dict[str, Any] = {
            "script": "/home/me/train.py",
            "name": "train",
            "run_id": "train-1",
            "run_dir": "/home/me/runs/train-1",
            "backend": "slurm",
            "python": "/usr/bin/python3",
            "workdir": "/home/me",
        }
        return JobSpec(**(defaults | fields))

    return call
