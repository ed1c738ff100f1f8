"""How runs are looked at where Slurm does not answer, and how they are named."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time

import pytest
from helpers.commands import run_on_terminal

from hpctrain.cli.serve import RunPages
from hpctrain.rundir import RunDir


@pytest.fixture
def lost(tmp_path) -> RunDir:
    """A run whose Slurm has vanished."""
    run = RunDir(tmp_path / "runs" / "lost")
    run.path.mkdir(parents=True)
    run.spec.touch()
    run.log_event("submitted", 0, job_id="17", backend="slurm")
    return run


GONE = {"SLURM_CONF": "/nowhere/slurm.conf"}


def test_slurm_that_is_gone_leaves_a_run_unknown_and_says_since_when(hpctrain, lost):
    status = json.loads(hpctrain("status", "lost", "--json", env=GONE).stdout)
    assert (status["state"], status["job_state"]) == ("UNKNOWN", None)
    assert 0 <= status["unknown_s"] < 60
    assert "/nowhere/slurm.conf" in status["words"]
    text = hpctrain("status", "lost", env=GONE).stdout
    assert "state       UNKNOWN: unknown for" in text
    listed = hpctrain("list", env=GONE).stdout
    assert "lost  UNKNOWN" in listed
    assert "unknown for" in listed


def test_waiting_for_a_slurm_that_is_gone_says_what_for(hpctrain, lost):
    done = hpctrain("wait", "lost", "--timeout", "0.5", env=GONE)
    assert done.returncode == 1
    words, error = done.stderr.splitlines()
    assert words.startswith("Waiting for run lost: its state is unknown for ")
    assert words.endswith("; this does not affect the run")
    assert error.startswith("Error: Run lost did not end within 0.5 s; its state is unknown for ")
    assert "/nowhere/slurm.conf" in error
    assert error.endswith("). Wait again, or cancel the run.")


def test_waiting_for_a_slurm_that_never_comes_back_has_an_end(hpctrain, lost):
    past = time.time() - 100
    lost.events.write_text(re.sub(r'"time": [\d.]+', f'"time": {past}', lost.events.read_text()))
    os.utime(lost.events, (past, past))
    done = hpctrain("wait", "lost", "--unknown-limit", "1", env=GONE)
    assert done.returncode == 3
    words, error = done.stderr.splitlines()
    assert words.startswith("Waiting for run lost: ")
    assert error.startswith("Error: Stopped waiting after 1 s: the state of run lost is unknown for 10")
    assert "/nowhere/slurm.conf" in error


def test_a_task_of_an_array_is_named_behind_it(hpctrain, lost):
    for index, state in ((0, "COMPLETED"), (1, "FAILED"), (2, "CANCELLED")):
        task = lost.task(index)
        task.path.mkdir()
        task.spec.touch()
        task.log_event("submitted", 0, job_id=f"17_{index}", backend="slurm")
        task.log_event("finished", 0, state=state, cause="boom" if state == "FAILED" else None)
    status = json.loads(hpctrain("status", "lost", "--json", env=GONE).stdout)
    assert status["tasks"] == {"FAILED": 1, "CANCELLED": 1, "COMPLETED": 1}
    assert (status["state"], status["cause"]) == ("FAILED", "lost/task-1: boom")
    assert "3 tasks: 1 FAILED, 1 CANCELLED, 1 COMPLETED" in hpctrain("list", env=GONE).stdout
    one = json.loads(hpctrain("status", "lost/task-0", "--json", env=GONE).stdout)
    assert (one["run_id"], one["state"], one["tasks"]) == ("lost/task-0", "COMPLETED", None)
    done = hpctrain("wait", "lost", env=GONE)
    assert done.returncode == 4
    assert "run          lost: FAILED, 3 tasks: 1 FAILED" in done.stdout
    assert "hpctrain status lost/task-1" in done.stdout
    assert done.stderr == ""


@pytest.mark.ranks
def test_a_script_that_reports_no_steps_is_said_to(hpctrain, tmp_path):
    """The script of the fixture prints a line and trains nothing that hpctrain knows of."""
    assert hpctrain("submit", "--backend", "local", "--run-dir", "runs/plain", "train.py").returncode == 0
    done = hpctrain("wait", "plain")
    words = "unknown: this script reports no steps"
    assert f"run          plain: COMPLETED, step {words}\n" in done.stdout
    assert f"step        {words}\n" in hpctrain("status", "plain").stdout
    status = json.loads(hpctrain("status", "plain", "--json").stdout)
    assert (status["step"], status["reports_steps"]) == (None, False)
    assert "  not reported  " in hpctrain("list").stdout
    assert f"step   {words}" in hpctrain("top", "plain").stdout
    assert "this script reports no steps" in hpctrain("report", "plain", "--format", "md").stdout
    pages = RunPages(tmp_path / "runs")
    assert '<td class="n">not reported</td>' in pages.page(None)
    assert "this script reports no steps" in pages.page("plain")


def test_the_list_has_a_header_on_a_terminal_only(hpctrain, tmp_path):
    for name, loss in (("one", 2.7978244721005296e-12), ("other", math.nan)):
        run = RunDir(tmp_path / "runs" / name)
        run.path.mkdir(parents=True)
        run.spec.touch()
        run.log_event("submitted", 0, job_id="17", backend="local")
        run.metrics.write_text(json.dumps({"step": 1200, "loss": loss, "time": time.time()}) + "\n")
        run.log_event("finished", 0, state="COMPLETED")
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
    assert hpctrain("list").stdout.splitlines() == lines
    assert "loss        2.7978e-12\n" in hpctrain("status", "one").stdout


@pytest.mark.ranks
def test_a_folder_that_looks_like_an_option_can_be_typed_as_it_is_told(hpctrain, tmp_path):
    done = hpctrain("submit", "--backend", "local", "--run-dir=-r", "--follow", "train.py")
    assert done.returncode == 0
    assert "hpctrain status ./-r" in done.stderr
    assert hpctrain("status", "./-r", "--json").returncode == 0


@pytest.mark.ranks
def test_what_failed_is_said_once(hpctrain, tmp_path):
    (tmp_path / "bad.py").write_text("raise RuntimeError('boom')\n")
    options = ("--backend", "local", "--max-failures", "1", "--run-dir", "r")
    done = hpctrain("submit", *options, "--follow", "bad.py")
    assert done.returncode == 4
    after_the_last_turn = done.stderr.rpartition("== ")[2]
    assert after_the_last_turn.count("cause        ") == 1
    assert "\nError: " not in done.stderr
    waited = hpctrain("wait", "r")
    assert (waited.returncode, waited.stderr) == (4, "")
    # The cause, and the last line of its traceback.
    assert waited.stdout.count("RuntimeError: boom") == 2
    assert "line 1, in <module>" in waited.stdout
