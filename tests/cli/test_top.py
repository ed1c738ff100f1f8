"""`hpctrain top`: with and without a terminal."""

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
    time.sleep(float(os.environ.get("STEP_S", "0.1")))
"""


def submit(hpctrain, tmp_path, step_s=0.1) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--backend", "local", "--run-dir", "r", "--env", f"STEP_S={step_s}"]
    result = hpctrain("submit", *options, "train.py")
    assert result.returncode == 0, result.stderr


@pytest.mark.ranks
def test_top_on_a_terminal_follows_the_run_to_its_end(hpctrain, tmp_path):
    submit(hpctrain, tmp_path, step_s=0.4)
    argv = [sys.executable, "-m", "hpctrain", "top", "r", "--interval", "0.2"]
    output = run_on_terminal(argv, tmp_path, columns=50)
    assert "RUNNING" in output or "PENDING" in output
    last = output[output.rindex("r  ") :]
    assert "r  COMPLETED" in last
    assert "20 of 20" in last
    assert "\x1b[31m" not in output


@pytest.mark.ranks
def test_top_without_a_terminal_prints_once(hpctrain, tmp_path):
    submit(hpctrain, tmp_path)
    assert hpctrain("wait", "r").returncode == 0
    for options in ([], ["--once"]):
        result = hpctrain("top", "r", *options)
        assert result.stdout.startswith("r  COMPLETED, attempt 0\nstep   20 of 20  ████")
        assert "\x1b" not in result.stdout
    document = json.loads(hpctrain("top", "r", "--json").stdout)
    assert (document["state"], document["step"], document["loss"]) == ("COMPLETED", 20, 1 / 20)
    assert document["events"][0]["kind"] == "finished"


@pytest.mark.long
def test_top_refuses_arrays_and_unknown_runs(hpctrain, tmp_path):
    assert hpctrain("top", "nothing").returncode == 2
    assert (
        hpctrain("submit", "--backend", "local", "--array", "0-1", "--run-dir", "a", "train.py").returncode
        == 0
    )
    assert hpctrain("wait", "a").returncode == 0
    result = hpctrain("top", "a")
    assert result.returncode == 2
    assert "task-0" in result.stderr
