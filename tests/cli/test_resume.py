"""`hpctrain resume` with the local backend."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.commands import run_command
from helpers.fake_slurm import FakeSlurm
from helpers.waiting import wait_for
from msgspec.structs import replace

from hpctrain.cli.main import cli
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.rundir import RunDir

pytestmark = pytest.mark.ranks

SCRIPT = """
import os, sys
print("arguments", sys.argv[1:], "world size", os.environ["WORLD_SIZE"], "color", os.environ.get("COLOR"))
"""


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def invoke(*args: str) -> str:
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_resume_repeats_the_submission_with_changed_options(workdir: Path) -> None:
    invoke("submit", "--backend=local", "--run-dir=runs/a", "--env=COLOR=red", "train.py", "--lr", "0.1")
    invoke("wait", "a")
    elsewhere = workdir / "elsewhere"
    elsewhere.mkdir()
    os.chdir(elsewhere)
    document = json.loads(invoke("resume", "../runs/a", "--ntasks-per-node=2", "--env=COLOR=blue", "--json"))
    assert document["run_dir"] == str(workdir / "runs/a")
    invoke("wait", str(workdir / "runs/a"))
    run = RunDir(workdir / "runs/a")
    log = run.rank_log(1, 0).read_text()
    assert "arguments ['--lr', '0.1'] world size 2 color blue" in log
    assert load_spec(run.spec).workdir == str(workdir)
    assert " resume [OPTIONS] RUN" in invoke("resume", str(run.path), "--nodes=2", "--help")


def refusal(*args: str) -> str:
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_resume_refuses_a_complete_run_without_changes(workdir: Path) -> None:
    invoke("submit", "--backend=local", "--run-dir=runs/a", "train.py")
    invoke("wait", "a")
    run = RunDir(workdir / "runs/a")
    run.metrics.write_text(json.dumps({"step": 40, "last_step": 40, "loss": 0.5}) + "\n")
    for options in ((), ("--json",)):
        assert "Run a is complete (step 40 of 40). To train longer, increase max_steps" in refusal(
            "resume", "a", *options
        )
    assert run.attempts() == [0]


def test_resume_refuses_an_active_run(workdir: Path) -> None:
    (workdir / "train.py").write_text("import time; time.sleep(60)")
    invoke("submit", "--backend=local", "--run-dir=runs/a", "train.py")
    try:
        wait_for(lambda: RunDir(workdir / "runs/a").attempts(), 20, "the first attempt")
        message = "Run a is still running. Cancel it first, or use `hpctrain requeue a`."
        assert message in refusal("resume", "a")
        assert message in refusal("resume", "a", "--nodes=2")
    finally:
        invoke("cancel", "a")
        CliRunner().invoke(cli, ["wait", "a"])


def test_resume_refuses_other_folders(workdir: Path) -> None:
    invoke("submit", "--backend=local", "--run-dir=runs/a", "train.py", "--lr", "0.1")
    invoke("wait", "a")
    for options in (["--run-dir=runs/b"], ["--set", "run_dir=runs/b"], ["--set=runs_dir=b"]):
        message = "continues run a in its folder, so --run-dir cannot be changed"
        assert message in refusal("resume", "a", *options)
    assert "No such option '--bogus'. `hpctrain submit --help`" in refusal("resume", "a", "--bogus")
    assert os.listdir("runs") == ["a"]


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        (["--", "--lr", "0.2"], "arguments ['--lr', '0.2']"),
        (["--name=b", "--"], "arguments []"),
        pytest.param(["--name=b", "--", "now"], "arguments ['now']", marks=pytest.mark.extended),
        (["other.py"], "other []"),
        (["other.py", "--lr", "0.2", "--", "x"], "other ['--lr', '0.2', '--', 'x']"),
        pytest.param(["--name=b", "-m", "other", "--nodes"], "other ['--nodes']", marks=pytest.mark.extended),
    ],
)
def test_resume_changes_the_arguments_or_the_script(workdir: Path, options: list[str], printed: str) -> None:
    (workdir / "other.py").write_text("import sys; print('other', sys.argv[1:])")
    invoke("submit", "--backend=local", "--run-dir=runs/a", "--env=COLOR=red", "train.py", "--lr", "0.1")
    invoke("wait", "a")
    invoke("resume", "a", *options)
    invoke("wait", "a")
    run = RunDir(workdir / "runs/a")
    assert os.listdir("runs") == ["a"]
    assert printed in run.rank_log(1, 0).read_text()
    assert load_spec(run.spec).env == {"COLOR": "red"}
    if printed != "arguments []":
        assert "\narguments   attempt 0: --lr 0.1; attempt 1: " in invoke("status", "a")
        again = json.loads(invoke("report", "a", "--json"))["again"]
        assert "# Arguments of attempt 0: --lr 0.1" in again


def resumed_spec(*options: str) -> JobSpec:
    invoke("resume", "a", "--set", "comment=", *options)
    invoke("wait", "a")
    return load_spec(RunDir(Path("runs/a")).spec)


def test_resumed_run_keeps_options_that_equal_the_defaults(workdir: Path) -> None:
    """Options that have changed in the configuration files since the submission do not apply."""
    invoke(
        *("submit", "--backend=local", "--run-dir=runs/a", "--standby-workers=never", "--hang-timeout=never"),
        *("--time=1", "--setup=: a", "--env=A=1", "train.py"),
    )
    invoke("wait", "a")
    (workdir / "hpctrain.yaml").write_text(
        "max_failures: 7\nhang_timeout: 600\nsetup: ['true']\nntasks_per_node: 3\nenv: {B: 2}\n"
        "profiles: {long: {stop_before_limit: 30}}\n"
    )
    before = load_spec(RunDir(Path("runs/a")).spec)
    assert resumed_spec() == before
    changed = resumed_spec("--profile=long", "--setup=: b", "--env=C=3", "--max-failures=9", "--time=60")
    assert changed == replace(
        before,
        shell=replace(before.shell, setup=(": b",)),
        env={"A": "1", "C": "3"},
        max_failures=9,
        stop_before_limit_s=30,
        time_limit_s=3600.0,
    )
    assert resumed_spec("--set", "stop_before_limit=").stop_before_limit_s == 120


def test_resume_names_files_in_the_old_code_snapshot(workdir: Path) -> None:
    (workdir / "train.py").write_text("from pathlib import Path; Path(__file__).with_name('last.pt').touch()")
    run_command(["git", "init", "-q", workdir])
    invoke("submit", "--backend=local", "--run-dir=runs/a", "train.py")
    invoke("wait", "a")
    result = CliRunner().invoke(cli, ["resume", "a", "--nodes=2", "--dry-run"])
    assert "/submission-000': 'last.pt'. This submission uses a new snapshot" in result.stderr


def test_resume_keeps_variables_of_sbatch(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their shell may be gone; those of the shell that resumes the run do not apply."""
    fake = FakeSlurm(workdir)
    monkeypatch.setenv("PATH", fake.environ["PATH"])
    monkeypatch.setenv("SBATCH_ACCOUNT", "physics")
    monkeypatch.setenv("SBATCH_TIMELIMIT", "90")
    invoke("submit", "--backend=slurm", "--run-dir=runs/a", "--array=0-1", "train.py")
    run = RunDir(workdir / "runs/a")
    assert load_spec(run.task(1).spec).directives == {"account": "physics"}
    for task in run.tasks():
        run.task(task).log_event("finished", 0, state="FAILED", exit_code=1, cause="x")
    monkeypatch.setenv("SBATCH_ACCOUNT", "biology")
    monkeypatch.setenv("SBATCH_PARTITION", "big")
    monkeypatch.delenv("SBATCH_TIMELIMIT")
    invoke("resume", "a")
    spec = load_spec(run.spec)
    assert (spec.directives, spec.time_limit_s) == ({"account": "physics"}, 5400.0)
    assert "#SBATCH --account=physics\n" in run.job_script.read_text()
    again = CliRunner().invoke(cli, ["submit", "--dry-run", "--run-dir=runs/a", "--array=0-1", "train.py"])
    assert "--account=physics" not in again.stderr
    monkeypatch.delenv("SBATCH_ACCOUNT")
    again = CliRunner().invoke(cli, ["submit", "--dry-run", "--run-dir=runs/a", "--array=0-1", "train.py"])
    assert "submitted with --account=physics, and is continued without" in again.stderr


def test_modules_of_another_shell_are_noted(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOADEDMODULES", "gcc/12:cuda/12.4")
    invoke("submit", "--backend=local", "--run-dir=runs/a", "train.py")
    invoke("wait", "a")

    def notes(*options: str) -> str:
        return CliRunner().invoke(cli, ["resume", "a", "--dry-run", "--max-failures=2", *options]).stderr

    assert "modules" not in notes()
    monkeypatch.setenv("LOADEDMODULES", "gcc/13")
    assert (
        "This shell has loaded the modules gcc/13, but the run was submitted with gcc/12 cuda/12.4."
        in notes()
    )
    assert "use --module NAME" in notes()
    assert "the run was submitted with" not in notes("--module=gcc/12", "--module=cuda/12.4")
