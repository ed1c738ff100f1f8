"""The last steps of a script that ends with `os._exit`."""

import json
import sys

import pytest
from helpers.commands import run_command

SCRIPT = """
import os, sys, threading
from pathlib import Path
from hpctrain.rundir import RunDir
from hpctrain.runtime.program import step_log
from hpctrain.runtime.rank_activity import activity

step_log._WRITE_LIMIT_S = 0.1
log = step_log.StepLog(RunDir(Path(sys.argv[1])), 0)
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
