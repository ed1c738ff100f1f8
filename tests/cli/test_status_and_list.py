"""`hpctrain status`, `wait` and `list`: unreachable Slurm, arrays and run names."""

import json
import math
import os
import re
import sys
import time
from pathlib import Path

import pytest
from helpers.run_histories import make_spec, started_run, write_run
from helpers.terminal import run_on_terminal

from hpctrain.cli.serve import RunPages
from hpctrain.errors import RunFailed
from hpctrain.rundir import RunDir

#: They start many processes or trainings, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow


@pytest.fixture
def unknown_run(tmp_path) -> RunDir:
    """A run whose Slurm has disappeared."""
    run = RunDir(tmp_path / "runs" / "lost")
    run.path.mkdir(parents=True)
    run.spec.touch()
    run.log_event("submitted", 0, job_id="17", backend="slurm")
    return run


GONE = {"SLURM_CONF": "/nowhere/slurm.conf"}


def test_run_is_unknown_while_slurm_is_unreachable(hpctrain, unknown_run):
    status = json.loads(hpctrain("status", "lost", "--json", env=GONE).stdout)
    assert (status["state"], status["job_state"]) == ("UNKNOWN", None)
    assert 0 <= status["unknown_s"] < 60
    assert "/nowhere/slurm.conf" in status["words"]
    text = hpctrain("status", "lost", env=GONE).stdout
    assert "state       UNKNOWN: unknown for" in text
    listed = hpctrain("list", env=GONE).stdout
    assert "lost  UNKNOWN" in listed
    assert "unknown for" in listed


def test_wait_stops_after_the_unknown_limit(hpctrain, unknown_run):
    past = time.time() - 100
    unknown_run.events.write_text(
        re.sub(r'"time": [\d.]+', f'"time": {past}', unknown_run.events.read_text())
    )
    os.utime(unknown_run.events, (past, past))
    result = hpctrain("wait", "lost", "--unknown-limit", "1", env=GONE)
    assert result.returncode == 3
    message, error = result.stderr.splitlines()
    assert message.startswith("Waiting for run lost: ")
    assert error.startswith("Error: Stopped waiting for run lost after 1 s (state: unknown for 10")
    assert "/nowhere/slurm.conf" in error


def test_status_of_an_array_counts_tasks_and_names_the_failed_one(hpctrain, unknown_run):
    for index, state in ((0, "COMPLETED"), (1, "FAILED"), (2, "CANCELLED")):
        task = unknown_run.task(index)
        task.path.mkdir()
        task.spec.touch()
        task.log_event("submitted", 0, job_id=f"17_{index}", backend="slurm")
        task.log_event("finished", 0, state=state, cause="boom" if state == "FAILED" else None)
    status = json.loads(hpctrain("status", "lost", "--json", env=GONE).stdout)
    assert status["tasks"] == {"FAILED": 1, "CANCELLED": 1, "COMPLETED": 1}
    assert (status["state"], status["cause"]) == ("FAILED", "lost/task-1: boom")
    assert "3 tasks: 1 FAILED, 1 CANCELLED, 1 COMPLETED" in hpctrain("list", env=GONE).stdout
    task_status = json.loads(hpctrain("status", "lost/task-0", "--json", env=GONE).stdout)
    assert (task_status["run_id"], task_status["state"], task_status["tasks"]) == (
        "lost/task-0",
        "COMPLETED",
        None,
    )
    result = hpctrain("wait", "lost", env=GONE)
    assert result.returncode == 4
    assert "run          lost: FAILED, 3 tasks: 1 FAILED" in result.stdout
    assert "hpctrain status lost/task-1" in result.stdout
    assert result.stderr == ""


@pytest.mark.ranks
def test_run_without_reported_steps_is_shown_as_such(hpctrain, tmp_path):
    """The script of the fixture prints a line and does not use hpctrain."""
    assert hpctrain("submit", "--backend", "local", "--run-dir", "runs/plain", "train.py").returncode == 0
    result = hpctrain("wait", "plain")
    message = "unknown: the script reports no steps"
    assert f"run          plain: COMPLETED, step {message}\n" in result.stdout
    assert f"step        {message}\n" in hpctrain("status", "plain").stdout
    status = json.loads(hpctrain("status", "plain", "--json").stdout)
    assert (status["step"], status["reports_steps"]) == (None, False)
    assert "  not reported  " in hpctrain("list").stdout
    assert f"step   {message}" in hpctrain("top", "plain").stdout
    assert "the script reports no steps" in hpctrain("report", "plain", "-o", "-").stdout
    pages = RunPages(tmp_path / "runs")
    assert '<td class="n">not reported</td>' in pages.page(())
    assert "the script reports no steps" in pages.page(("plain",))


def test_status_of_a_restarted_run_without_checkpoints(hpctrain, tmp_path):
    history = started_run().after(1, "failure", rank=0, cause="SIGKILL").after(0, "restart")
    history.after(1, "started", nodes=1).after(1, "finished", state="COMPLETED", exit_code=0)
    run = write_run(tmp_path / "r", history, script="train.py")
    text = hpctrain("status", "r").stdout
    assert re.search(r"restarts +1, the last at .*: restart\n", text)
    for attempt in (0, 1):
        assert "checkpoint  none" not in hpctrain("status", "r").stdout
        run.attempt_logs(attempt).mkdir(parents=True)
    text = "checkpoint  none in r/checkpoints; restarts start over, unless the script saves elsewhere"
    assert text in hpctrain("status", "r").stdout
    run.checkpoints.mkdir()
    (run.checkpoints / "last.pt").touch()
    assert "checkpoint  r/checkpoints/last.pt" in hpctrain("status", "r").stdout


def test_status_of_a_batch_script_names_the_pattern_of_its_checkpoints(hpctrain, tmp_path):
    run = write_run(tmp_path / "r", started_run())
    run.spec.write_text(make_spec(checkpoints=f"{tmp_path}/out/*.pt").text())
    run.batch_script.touch()
    run.attempt_logs(0).mkdir(parents=True)
    assert "none: no file matches out/*.pt (--checkpoints) yet" in hpctrain("status", "r").stdout


def test_pattern_that_matches_no_file_is_named_after_a_restart_and_the_end(hpctrain, tmp_path):
    """With the folder to which the user's pattern is relative."""
    message = f"no file matches {tmp_path}/out/*.pt (--checkpoints); if the script has saved any, correct"
    history = started_run().after(1, "failure", rank=0, cause="SIGKILL").after(0, "restart")
    run = write_run(tmp_path / "r", history.after(1, "started", nodes=1, starts_over=True))
    run.spec.write_text(make_spec(run.path, checkpoints=f"{tmp_path}/out/*.pt", backend="local").text())
    run.attempt_logs(1).mkdir(parents=True)
    run.checkpoints.mkdir()
    assert f"checkpoint  none: {message}" in hpctrain("status", "r").stdout
    run.log_event("finished", 1, state="COMPLETED", exit_code=0)
    (run.checkpoints / "other.pt").touch()
    assert f"checkpoint  r/checkpoints/other.pt; {message}" in hpctrain("status", "r").stdout
    assert f"note         {message}" in hpctrain("logs", "-f", "r").stderr
    assert f"Note: {message}" in hpctrain("checkpoints", "r").stderr
    assert f"N{message[1:]}" in hpctrain("report", "r", "-o", "-").stdout
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "last.pt").touch()
    for command in (["status"], ["checkpoints"], ["report", "-o", "-"], ["logs", "-f"]):
        result = hpctrain(*command, "r")
        assert "no file matches" not in result.stdout.lower() + result.stderr


def test_list_prints_a_header(hpctrain, tmp_path):
    for name, loss in (("one", 2.7978244721005296e-12), ("other", math.nan)):
        run = finished_run(tmp_path / "runs" / name, "COMPLETED")
        run.metrics.write_text(json.dumps({"step": 1200, "loss": loss, "time": time.time()}) + "\n")
        past = {"time": time.time() - 7260}
        lines = [json.loads(line) | past for line in run.events.read_text().splitlines()]
        run.events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    argv = [sys.executable, "-m", "hpctrain", "list"]
    header, *lines = run_on_terminal(argv, tmp_path, columns=100).replace("\r", "").splitlines()
    assert header.split() == ["RUN", "STATE", "JOB", "AGE", "STEP", "LOSS"]
    for title, cell in (("STATE", "COMPLETED"), ("JOB", "local 17"), ("AGE", "2 h 1 min")):
        assert header.index(title) == lines[0].index(cell)
    assert lines[0].split("  ")[-2:] == ["1\u202f200", "2.7978e-12"]
    assert lines[1].split()[-1] == "NaN"
    assert hpctrain("list").stdout.splitlines() == [header, *lines]
    assert "loss        2.7978e-12\n" in hpctrain("status", "one").stdout


def finished_run(folder: Path, state: str) -> RunDir:
    run = RunDir(folder)
    run.path.mkdir(parents=True)
    run.spec.touch()
    run.log_event("submitted", 0, job_id="17", backend="local")
    run.log_event("finished", 0, state=state)
    return run


def test_wait_and_cancel_accept_several_runs(hpctrain, tmp_path):
    for name, state in (("a", "COMPLETED"), ("b", "FAILED"), ("c", "COMPLETED")):
        finished_run(tmp_path / "runs" / name, state)
    result = hpctrain("wait", "a", "b", "c", "--timeout=20")
    assert result.returncode == RunFailed.exit_code
    ends = [line.split() for line in result.stdout.splitlines() if line.startswith("run ")]
    assert [(name, state) for _, name, state in ends] == [
        ("a:", "COMPLETED"),
        ("b:", "FAILED"),
        ("c:", "COMPLETED"),
    ]
    assert hpctrain("wait", "a", "c").returncode == 0
    assert json.loads(hpctrain("wait", "a", "--json").stdout)["run_id"] == "a"
    assert json.loads(hpctrain("wait", "17", "--json").stdout)["run_id"] == "c"  # the newest of job 17
    assert "There is no run '17_9'" in hpctrain("wait", "17_9").stderr
    assert [run["run_id"] for run in json.loads(hpctrain("wait", "a", "c", "--json").stdout)] == ["a", "c"]
    assert "Run b has already finished (FAILED)" in hpctrain("cancel", "a", "b").stdout
    assert "There is no run 'x'" in hpctrain("cancel", "a", "x").stderr
    assert hpctrain("wait").returncode == 2


@pytest.mark.ranks
def test_failure_is_reported_once(hpctrain, tmp_path):
    (tmp_path / "bad.py").write_text("raise RuntimeError('boom')\n")
    options = ("--backend", "local", "--max-failures", "1", "--run-dir", "r")
    result = hpctrain("submit", *options, "--follow", "bad.py")
    assert result.returncode == 4
    last_status = result.stderr.rpartition("== ")[2]
    assert last_status.count("cause        ") == 1
    assert "\nError: " not in result.stderr
    waited = hpctrain("wait", "r")
    assert (waited.returncode, waited.stderr) == (4, "")
    # The cause, and the last line of its traceback.
    assert waited.stdout.count("RuntimeError: boom") == 2
    assert "line 1, in <module>" in waited.stdout
