"""The last steps of a script that ends with `os._exit`."""

import json
import subprocess
import sys

import pytest
from helpers.commands import run_command

from hpctrain.rundir import RunDir

SCRIPT = """
import os, sys, threading
from pathlib import Path
from hpctrain.rundir import RunDir
from hpctrain.runtime.program import step_log
from hpctrain.runtime.rank_activity import activity

step_log._WRITE_LIMIT_S = 0.1
log = step_log.StepLog(RunDir(Path(sys.argv[1])), 0, 1, 1)
activity.optimizer_steps, activity.restored_steps = 3, 0
if os.fork() == 0:
    os._exit(0)
os.wait()
if sys.argv[2] == "blocked":
    log._writing.acquire()
os._exit(7)
"""


@pytest.mark.parametrize(("mode", "steps"), [("free", [3]), ("blocked", [])])
def test_steps_are_written_once_at_os_exit(tmp_path, mode, steps):
    """A signal handler may exit during a write, and a disk may hang."""
    result = run_command([sys.executable, "-c", SCRIPT, tmp_path, mode], timeout=30, check=False)
    assert result.returncode == 7, result.stderr
    metrics = tmp_path / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    assert [json.loads(line)["step"] for line in lines] == steps


PROGRAM = """
import sys
from pathlib import Path
from hpctrain.rundir import RunDir
from hpctrain.runtime.program.step_log import StepLog
from hpctrain.runtime.rank_activity import activity

log = StepLog(RunDir(Path(sys.argv[1])), 0, 1, 1)
activity.restored_steps = 0
for step in map(int, sys.stdin):
    activity.optimizer_steps = step
    log.write()
    print(step, flush=True)
"""


def test_steps_of_programs_that_run_at_once_are_not_mixed(tmp_path):
    RunDir(tmp_path).attempt_logs(0).mkdir(parents=True)
    command = [sys.executable, "-c", PROGRAM, tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as program, subprocess.Popen(command, **pipes) as other:
        for process, step in ((program, 1), (other, 70), (program, 2), (other, 80)):
            process.stdin.write(f"{step}\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{step}\n"
    subprocess.run(command, input="1\n", text=True, timeout=60, check=True)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 1]
    # The number of ranks that train is unknown while several programs train.
    ranks = [json.loads(line)["world_size"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert ranks == [1, None, 1]
