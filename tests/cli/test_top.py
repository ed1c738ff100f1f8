"""`hpctrain top`: without a terminal, on one, and to its end."""

from __future__ import annotations

import json
import sys

import pytest
from helpers.commands import run_on_terminal

SCRIPT = """
import json, os, pathlib, time
run = pathlib.Path(os.environ["HPCTRAIN_RUN_DIR"])
for step in range(1, 21):
    line = {"step": step, "loss": 1 / step, "time": time.time(), "attempt": 0, "epoch": 0, "last_step": 20}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\\n")
    time.sleep(0.1)
"""


def submit(hpctrain, tmp_path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = hpctrain("submit", "--backend", "local", "--run-dir", "r", "train.py")
    assert done.returncode == 0, done.stderr


@pytest.mark.ranks
def test_a_terminal_is_shown_the_run_to_its_end(hpctrain, tmp_path):
    submit(hpctrain, tmp_path)
    argv = [sys.executable, "-m", "hpctrain", "top", "r", "--interval", "0.2"]
    shown = run_on_terminal(argv, tmp_path, columns=50)
    assert "RUNNING" in shown or "PENDING" in shown
    last = shown[shown.rindex("r  ") :]
    assert "r  COMPLETED" in last
    assert "20 of 20" in last
    assert "\x1b[31m" not in shown


@pytest.mark.ranks
def test_without_a_terminal_one_look_is_printed(hpctrain, tmp_path):
    submit(hpctrain, tmp_path)
    assert hpctrain("wait", "r").returncode == 0
    for options in ([], ["--once"]):
        done = hpctrain("top", "r", *options)
        assert done.stdout.startswith("r  COMPLETED, attempt 0\nstep   20 of 20  ████")
        assert "\x1b" not in done.stdout
    document = json.loads(hpctrain("top", "r", "--json").stdout)
    assert (document["state"], document["step"], document["loss"]) == ("COMPLETED", 20, 1 / 20)
    assert document["events"][0]["kind"] == "finished"


@pytest.mark.long
def test_a_job_array_and_a_run_that_is_not_there(hpctrain, tmp_path):
    assert hpctrain("top", "nothing").returncode == 2
    assert (
        hpctrain("submit", "--backend", "local", "--array", "0-1", "--run-dir", "a", "train.py").returncode
        == 0
    )
    assert hpctrain("wait", "a").returncode == 0
    done = hpctrain("top", "a")
    assert done.returncode == 2
    assert "task-0" in done.stderr
