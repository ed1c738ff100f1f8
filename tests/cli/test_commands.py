"""The command line as a user meets it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from helpers.commands import environment, run_command
from helpers.processes import assert_no_process_left
from helpers.waiting import wait_for

from hpctrain.cli.common import json_text


def test_help_names_every_command(hpctrain):
    done = hpctrain("--help")
    assert done.returncode == 0
    for name in ("submit", "status", "list", "logs", "wait", "cancel", "requeue", "env", "exec", "sandbox"):
        assert f"\n  {name} " in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["submti", "train.py"], "Did you mean 'submit'"),
        (["submit"], "Missing argument 'SCRIPT'"),
        (["submit", "--partitoin", "x", "train.py"], "--partition"),
        (["submit", "--backend", "slrm", "train.py"], "must be auto, slurm or local"),
        (["submit", "--template", "dpd", "train.py"], "Did you mean 'ddp'"),
        (["submit", "--gpus-per-node", "two", "train.py"], "'two', but must be a number, such as 8"),
        (["submit", "--cpus-per-task", "two", "train.py"], "'two', but must be an integer"),
        (["submit", "--set", "cpus_per_task=two", "train.py"], "--set cpus_per_task is 'two'"),
        (["submit", "--profile", "x", "train.py"], "Unknown profile 'x'"),
        (["submit", "--explain", "--dry-run", "train.py"], "Use only one of these options"),
        (["submit", "--array", "3-1", "train.py"], "the range '3-1' is empty"),
        (["init", "train.py"], "already exists"),
        (["init", "no/where.yaml"], "Cannot write 'no/where.yaml'"),
        (["submit", "--nodes", "0", "train.py"], "nodes is 0"),
        (["submit", "--nodes", "4:1", "train.py"], "1 ≤ MIN ≤ MAX, such as 2:4"),
        (["submit", "--env", "=A", "train.py"], "KEY=VALUE"),
        (
            ["submit", "--env", "NOT_SET", "train.py"],
            "'NOT_SET' is not set in the environment of this shell. Export this variable",
        ),
        (["submit", "--sbatch", "nodes=3", "train.py"], "Use --nodes"),
        (["submit", "--sbatch", "--partitoin=x", "train.py"], "Did you mean 'partition'"),
        (["submit", "--sbatch", "--partition=x", "train.py"], "Use --partition"),
        (["submit", "nowhere.py"], "nowhere.py' not found"),
        (["submit", "--run-dir", "/proc/run", "train.py"], "Cannot write the run folder"),
        (["status", "nothing"], "no run 'nothing'"),
        (["submit", "--run-dir", "x" * 300, "train.py"], "File name too long"),
        (["submit", "x" * 300], "File name too long"),
        (["status", "x" * 300], "File name too long"),
        (["list", "--runs-dir", "x" * 300], "File name too long"),
        (["submit", "--dry-run", "--json", "train.py"], "Use only one of these options"),
        (["submit", "--backend", "local", "--nodes", "9999", "train.py"], "9999 ranks requested"),
        (["logs", "nothing"], "no run 'nothing'"),
        (["wait", "--timeout", "-1", "nothing"], "-1"),
    ],
)
def test_bad_input_ends_with_2_and_words(hpctrain, tmp_path, args, words):
    done = hpctrain(*args)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.ranks
def test_a_file_that_cannot_be_read_is_one_sentence(hpctrain, tmp_path):
    assert hpctrain("submit", "--backend", "local", "--run-dir", "r", "--follow", "train.py").returncode == 0
    (tmp_path / "r" / "events.jsonl").unlink()
    (tmp_path / "r" / "events.jsonl").mkdir()
    done = hpctrain("status", "r")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "events.jsonl': Is a directory" in line


def test_slurm_that_does_not_answer_ends_with_3(hpctrain):
    done = hpctrain("submit", "--backend", "slurm", "train.py", env={"SLURM_CONF": "/nowhere"})
    assert done.returncode == 3
    assert "Slurm does not respond on this machine" in done.stderr


def test_a_dry_run_executes_nothing_of_the_project(hpctrain, tmp_path):
    """Whatever a cloned or unpacked project may bring, only a real submission runs it."""
    ran = tmp_path / "ran"
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.py").write_text(f"open({str(ran)!r}, 'w')\n")
    (project / "monitor").write_text(f"#!/bin/sh\ntouch {ran}\n")
    (project / "monitor").chmod(0o755)
    run_command(["git", "init", "-q", project])
    run_command(["git", "-C", project, "config", "core.fsmonitor", str(project / "monitor")])
    attack = f"{{% set x = cycler.__init__.__globals__.os.popen('touch {ran}').read() %}}"
    (project / "t.sbatch.j2").write_text(attack + '{% extends "cpu.sbatch.j2" %}')
    touch = f"touch {ran}"
    for template, code in (("", 0), ("template: ./t.sbatch.j2\n", 2)):
        (project / "hpctrain.yaml").write_text(
            f"{template}setup: [{touch}]\nnotify: [{touch}]\nenv: {{BASH_ENV: ./monitor}}\n"
        )
        command = [
            sys.executable,
            "-P",
            "-m",
            "hpctrain",
            "submit",
            "--dry-run",
            "--backend",
            "local",
            "job.py",
        ]
        done = run_command(command, cwd=project, check=False)
        assert done.returncode == code, done.stderr
        assert ("is blocked" in done.stderr) == bool(code)
        assert not ran.exists()


def test_dry_run_prints_the_script_alone_and_creates_nothing(hpctrain, tmp_path):
    done = hpctrain("submit", "--dry-run", "--backend", "local", "--run-dir", "a b", "train.py")
    assert done.returncode == 0
    assert done.stdout.startswith("#!/bin/bash\n")
    assert done.stdout.endswith(f"-m hpctrain.supervisor '{tmp_path}/a b'\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.ranks
def test_the_whole_way(hpctrain, tmp_path):
    """Submitted, followed to the end, looked at, and continued."""
    args = ["--lr", "0.1", "--", "--help", "$(x)", "a\nb", "--nodes", "9"]
    options = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "2", "--run-dir", "r"]
    done = hpctrain("submit", *options, "--follow", "train.py", *args)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"args {args!r}\n"
    assert "== attempt 0: starting, world size 4, nodes 2" in done.stderr
    assert "r: COMPLETED" in done.stderr
    assert "hpctrain status r" in done.stderr
    assert (tmp_path / "r" / "job.sbatch").read_text() == hpctrain(
        "submit", "--dry-run", *options, "train.py"
    ).stdout
    assert_no_process_left(tmp_path / "r")

    status = json.loads(hpctrain("status", "r", "--json").stdout)
    assert (status["state"], status["attempt"], status["backend"]) == ("COMPLETED", 0, "local")
    assert "state       COMPLETED" in hpctrain("status", "r").stdout
    assert hpctrain("status", "--runs-dir=.").stdout.startswith("r  COMPLETED")
    here = ("--runs-dir=.", "--json")
    assert hpctrain("status", *here).stdout == hpctrain("list", *here).stdout
    assert hpctrain("logs", "r", "--rank", "3").stdout == f"args {args!r}\n"
    assert "Available: ranks 0-3" in hpctrain("logs", "r", "--rank", "4").stderr
    assert hpctrain("wait", "r").returncode == 0
    assert "COMPLETED" in hpctrain("list", "--runs-dir", ".").stdout
    assert [run["run_id"] for run in json.loads(hpctrain("list", "--runs-dir", ".", "--json").stdout)] == [
        "r"
    ]
    assert "has already finished" in hpctrain("cancel", "r").stdout
    assert "only running runs" in hpctrain("requeue", "r").stderr

    again = hpctrain("submit", "--backend", "local", "--run-dir", "r", "--json", "train.py", "second")
    facts = json.loads(again.stdout)
    assert (facts["run_id"], facts["backend"], facts["run_dir"]) == ("r", "local", str(tmp_path / "r"))
    waited = hpctrain("wait", "r", "--json")
    assert json.loads(waited.stdout)["attempt"] == 1
    assert hpctrain("logs", "r").stdout == "args ['second']\n"


@pytest.mark.ranks
def test_an_array_names_its_tasks_and_each_script_its_number(hpctrain, tmp_path):
    (tmp_path / "task.py").write_text(
        "import os\nprint(os.environ['HPCTRAIN_ARRAY_TASK_ID'], os.environ['SLURM_ARRAY_TASK_ID'])\n"
    )
    command = ["submit", "--backend", "local", "--run-dir", "r", "--array", "3,5%2"]
    facts = json.loads(hpctrain(*command, "--json", "task.py").stdout)
    assert (facts["run_id"], facts["tasks"]) == ("r", [3, 5])
    assert hpctrain("wait", "r").returncode == 0
    assert [hpctrain("logs", f"r/task-{index}").stdout for index in (3, 5)] == ["3 3\n", "5 5\n"]
    assert "logs -f r  |" in hpctrain(*command[:-1], "5", "task.py").stdout
    hpctrain("cancel", "r")
    assert_no_process_left(tmp_path / "r")


@pytest.mark.ranks
def test_a_failure_ends_with_4_and_the_cause_comes_first(hpctrain, tmp_path):
    (tmp_path / "bad.py").write_text("raise RuntimeError('boom')\n")
    done = hpctrain("submit", "--backend", "local", "--run-dir", "r", "--follow", "bad.py")
    assert done.returncode == 4
    cause = next(line for line in done.stderr.splitlines() if line.startswith("cause"))
    assert "boom" in cause
    assert "r/logs/attempt-" in done.stderr.partition(cause)[2].splitlines()[1]
    assert hpctrain("wait", "r").returncode == 4
    assert_no_process_left(tmp_path / "r")


@pytest.mark.ranks
def test_looking_away_leaves_the_run_alone(hpctrain, tmp_path):
    (tmp_path / "slow.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    command = [
        sys.executable,
        "-m",
        "hpctrain",
        "submit",
        "--backend",
        "local",
        "--run-dir",
        "r",
        "--follow",
        "slow.py",
    ]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        log = tmp_path / "r" / "logs" / "attempt-000" / "rank-00000.log"
        wait_for(lambda: log.exists() and "here" in log.read_text(), 30, "the rank to start")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    assert "hpctrain logs -f r" in err
    assert json.loads(hpctrain("status", "r", "--json").stdout)["state"] == "RUNNING"
    done = hpctrain("wait", "r", "--timeout", "0.1")
    assert done.returncode == 1
    assert "RUNNING" in done.stderr
    assert json.loads(hpctrain("cancel", "r", "--json").stdout)["cancelled"] is True
    assert hpctrain("wait", "r").returncode == 4
    assert_no_process_left(tmp_path / "r")


def test_a_script_that_is_no_python_is_refused_with_its_line(hpctrain, tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\nif x\n")
    done = hpctrain("submit", "bad.py")
    assert done.returncode == 2
    assert "syntax error in line 2" in done.stderr


def test_a_folder_with_a_specification_of_something_else_is_no_run(hpctrain, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "spec.yaml").write_text("openapi: 3.0.0\n")
    done = hpctrain("submit", "--backend", "local", "--run-dir", "other", "train.py")
    assert done.returncode == 2
    assert "neither empty nor a run" in done.stderr
    assert (tmp_path / "other" / "spec.yaml").read_text() == "openapi: 3.0.0\n"


@pytest.mark.ranks
def test_closed_standard_streams_do_not_cost_the_run_its_lock(hpctrain, tmp_path):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(300)\n")
    command = f"{sys.executable} -m hpctrain submit --backend local --run-dir r slow.py <&- >&- 2>&-"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment(), check=True, timeout=60)
    assert json.loads(hpctrain("status", "r", "--json").stdout)["state"] == "RUNNING"
    refused = hpctrain("submit", "--run-dir", "r", "train.py")
    assert "still active" in refused.stderr
    hpctrain("cancel", "r")
    assert_no_process_left(tmp_path / "r", timeout=30)


def test_what_is_no_number_is_a_text_in_a_document():
    document = {"loss": float("nan"), "best": [float("inf"), -float("inf"), 1.5], "state": None}
    text = json_text(document)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "loss": "NaN",
        "best": ["Infinity", "-Infinity", 1.5],
        "state": None,
    }
