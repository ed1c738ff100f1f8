"""The command line, end to end."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from helpers.commands import environment, run_command
from helpers.processes import assert_no_process_left

from hpctrain.cli.common import json_text
from hpctrain.cli.main import cli


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["submti", "train.py"], "Did you mean 'submit'"),
        (["submit"], "Missing argument 'SCRIPT'"),
        (["submit", "--partitoin", "x", "train.py"], "--partition"),
        (["submit", "--template", "dpd", "train.py"], "Did you mean 'ddp'"),
        (["submit", "--gpus-per-node", "two", "train.py"], "'two', but must be a number, such as 8"),
        (["submit", "--set", "cpus_per_task=two", "train.py"], "--set cpus_per_task is 'two'"),
        (["submit", "--profile", "x", "train.py"], "Unknown profile 'x'"),
        (["submit", "--show-config", "--dry-run", "train.py"], "Use only one of these options"),
        (["init", "train.py"], "already exists"),
        (["init", "no/where.yaml"], "Cannot write 'no/where.yaml'"),
        (["submit", "--env", "=A", "train.py"], "'=A' is not of the form NAME[=VALUE]"),
        (
            ["submit", "--env", "NOT_SET", "train.py"],
            "'NOT_SET' is not set in the environment of this shell. Export the variable",
        ),
        (["submit", "--sbatch", "nodes=3", "train.py"], "Use --nodes"),
        (["submit", "--sbatch", "--partitoin=x", "train.py"], "Did you mean 'partition'"),
        (["submit", "nowhere.py"], "nowhere.py' not found"),
        (["submit", "--run-dir", "/proc/run", "train.py"], "Cannot write to the run folder"),
        (["status", "nothing"], "no run 'nothing'"),
        (["submit", "--run-dir", "x" * 300, "train.py"], "File name too long"),
        (["submit", "--dry-run", "--json", "train.py"], "Use only one of these options"),
        (["submit", "--backend", "local", "--nodes", "9999", "train.py"], "requests 9999 ranks"),
        (["cancel", "nothing", "nobody"], "Nothing was done."),
        (["resume", "train.py"], "To submit it: hpctrain submit train.py"),
        (["wait", "--timeout", "-1", "nothing"], "-1"),
    ],
)
def test_bad_input_exits_with_2_and_a_message(hpctrain, tmp_path, args, message):
    result = hpctrain(*args)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


def test_unreachable_slurm_exits_with_3(hpctrain):
    result = hpctrain("submit", "--backend", "slurm", "train.py", env={"SLURM_CONF": "/nowhere"})
    assert result.returncode == 3
    assert "Slurm cannot be used on this machine" in result.stderr


def test_dry_run_executes_no_code_of_the_project(hpctrain, tmp_path):
    """Only a real submission runs code that a cloned or unpacked project brings."""
    marker = tmp_path / "ran"
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.py").write_text(f"open({str(marker)!r}, 'w')\n")
    (project / "monitor").write_text(f"#!/bin/sh\ntouch {marker}\n")
    (project / "monitor").chmod(0o755)
    run_command(["git", "init", "-q", project])
    run_command(["git", "-C", project, "config", "core.fsmonitor", str(project / "monitor")])
    attack = f"{{% set x = cycler.__init__.__globals__.os.popen('touch {marker}').read() %}}"
    (project / "t.sbatch.j2").write_text(attack + '{% extends "cpu.sbatch.j2" %}')
    command_line = f"touch {marker}"
    for template, code in (("", 0), ("template: ./t.sbatch.j2\n", 2)):
        (project / "hpctrain.yaml").write_text(
            f"{template}setup: [{command_line}]\nnotify: [{command_line}]\nenv: {{BASH_ENV: ./monitor}}\n"
        )
        command = [
            sys.executable,
            *["-P", "-m", "hpctrain", "submit", "--dry-run", "--backend", "local", "job.py"],
        ]
        result = run_command(command, cwd=project, check=False)
        assert result.returncode == code, result.stderr
        assert ("blocked expression" in result.stderr) == bool(code)
        assert not marker.exists()


def test_dry_run_prints_only_the_script_and_creates_nothing(hpctrain, tmp_path):
    result = hpctrain("submit", "--dry-run", "--backend", "local", "--run-dir", "a b", "train.py")
    assert result.returncode == 0
    assert result.stdout.startswith("#!/bin/bash\n")
    assert result.stdout.endswith(f"-m hpctrain.supervisor '{tmp_path}/a b' \"$@\"\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
    assert "Nothing was submitted. This script needs the run folder" in result.stderr
    assert "\n# It needs the run folder that `hpctrain submit` creates" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--exclusive=user"], "does not take a value. Use --sbatch exclusive=VALUE"),
        (["--nice"], "'train.py' is not a value of --nice. Write --nice=VALUE, or --sbatch nice without"),
        (["--propagate"], "or --sbatch propagate without a value"),
    ],
)
def test_value_that_an_option_of_sbatch_may_omit_is_not_the_script(hpctrain, options, message):
    result = hpctrain("submit", "--dry-run", "--backend=local", *options, "train.py")
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr
    written = ["--nice=5", "--sbatch", "propagate", "--sbatch", "exclusive=user"]
    script = hpctrain("submit", "--dry-run", "--backend=local", *written, "train.py").stdout
    assert "#SBATCH --nice=5\n#SBATCH --propagate\n#SBATCH --exclusive=user\n" in script


def test_option_after_the_script_is_reported(hpctrain, tmp_path):
    (tmp_path / "train.py").write_text("'--spare-nodes', config.max_failures")
    words = ["--json", "--spare-nodes=2", "--max_failures", "3", "--max-failures=4", "--lr=1"]
    result = hpctrain("submit", "--dry-run", "--backend=local", "train.py", *words)
    notes = [line for line in result.stderr.splitlines() if line.startswith("Note: ")]
    assert notes == ["Note: --json is passed to train.py. Put options of hpctrain before the script."]


@pytest.mark.ranks
def test_run_is_submitted_followed_inspected_and_continued(hpctrain, tmp_path):
    """One run through submit, status, logs, list and a second submit."""
    args = ["--lr", "0.1", "--", "--help", "$(x)", "a\nb", "--nodes", "9"]
    options = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "2", "--run-dir", "r"]
    result = hpctrain("submit", *options, "--follow", "train.py", *args)
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"args {args!r}\n"
    assert "== attempt 0: starting, world size 4, nodes 2" in result.stderr
    assert "r: COMPLETED" in result.stderr
    assert "hpctrain status r" in result.stderr
    assert (tmp_path / "r" / "job.sbatch").read_text() == hpctrain(
        "submit", "--dry-run", *options, "train.py", *args
    ).stdout
    assert_no_process_left(tmp_path / "r")

    status = json.loads(hpctrain("status", "r", "--json").stdout)
    assert (status["state"], status["attempt"], status["backend"]) == ("COMPLETED", 0, "local")
    assert "state       COMPLETED" in hpctrain("status", "r").stdout
    assert "\nr    COMPLETED" in hpctrain("status", "--runs-dir=.").stdout
    listed = hpctrain("list", "--runs-dir=.", "--json").stdout
    assert [run["run_id"] for run in json.loads(listed)] == ["r"]
    assert hpctrain("status", "--runs-dir=.", "--json").stdout == listed
    assert hpctrain("logs", "r", "--rank", "3").stdout == f"args {args!r}\n"
    assert "Available: ranks 0-3" in hpctrain("logs", "r", "--rank", "4").stderr
    assert "Only a run that is RUNNING can be requeued" in hpctrain("requeue", "r").stderr

    resubmitted = hpctrain("submit", "--backend", "local", "--run-dir", "r", "--json", "train.py", "second")
    facts = json.loads(resubmitted.stdout)
    assert (facts["run_id"], facts["backend"], facts["run_dir"]) == ("r", "local", str(tmp_path / "r"))
    waited = hpctrain("wait", "r", "--json")
    assert json.loads(waited.stdout)["attempt"] == 1
    assert hpctrain("logs", "r").stdout == "args ['second']\n"


@pytest.mark.ranks
def test_run_stays_locked_when_standard_streams_are_closed(hpctrain, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(300)\n")
    command = f"{sys.executable} -m hpctrain submit --backend local --run-dir r slow.py <&- >&- 2>&-"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment(), check=True, timeout=120)
    assert json.loads(hpctrain("status", "r", "--json").stdout)["state"] == "RUNNING"
    refused = hpctrain("submit", "--run-dir", "r", "train.py")
    assert "still active" in refused.stderr
    hpctrain("cancel", "r")
    assert_no_process_left(tmp_path / "r", timeout=30)


def test_non_finite_numbers_become_strings_in_json():
    document = {"loss": float("nan"), "best": [float("inf"), -float("inf"), 1.5], "state": None}
    text = json_text(document)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "loss": "NaN",
        "best": ["Infinity", "-Infinity", 1.5],
        "state": None,
    }


def test_interrupted_command_exits_with_130(monkeypatch):
    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hpctrain.cli.common.open_run", interrupt)
    result = CliRunner().invoke(cli, ["wait", "run"])
    assert (result.exit_code, result.output) == (130, "\n")
