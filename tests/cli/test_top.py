"""`hpctrain top`: with and without a terminal."""

import json
import sys

import pytest
from helpers.terminal import run_on_terminal

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


@pytest.mark.extended
@pytest.mark.ranks
def test_top_shows_several_runs_and_filters_them(hpctrain, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--backend=local", "--concurrent=2", "--run-dir=runs/s", "--no-code-snapshot", "train.py"]
    assert hpctrain("sweep", "--over", "lr=0.1,0.2", *words).returncode == 0
    assert hpctrain("wait", "s").returncode == 0
    (tmp_path / "train.py").write_text("raise SystemExit('wrong')")
    words = ["--backend=local", "--run-dir=runs/wrong", "--no-code-snapshot", "train.py"]
    assert hpctrain("submit", *words).returncode == 0
    assert hpctrain("wait", "wrong").returncode == 4

    def rows(*args: str) -> list[list[str]]:
        return [line.split()[:2] for line in hpctrain("top", *args).stdout.splitlines()[1:]]

    trials = [["s/task-1", "COMPLETED"], ["s/task-0", "COMPLETED"]]
    assert rows() == [["wrong", "FAILED"], *trials]
    assert rows("s") == trials
    assert rows("--filter", "completed LR=0.2") == trials[:1]
    assert rows("s/task-0", "wrong") == [["wrong", "FAILED"], trials[1]]
    assert "20 of 20" in hpctrain("top", "s").stdout
    assert [one["run_id"] for one in json.loads(hpctrain("top", "s", "--json").stdout)] == [
        run for run, _ in trials
    ]
    assert "\nlog\nwrong\n" in hpctrain("top", "wrong").stdout
    result = hpctrain("top", "--filter", "nothing")
    assert (result.returncode, result.stdout) == (2, "")
    assert "No run matches (--filter" in result.stderr


def test_top_refuses_unknown_runs(hpctrain):
    assert hpctrain("top", "nothing").returncode == 2
    assert "No run matches" in hpctrain("top").stderr
