"""Two hundred runs of a trivial script, as many at once as fit into half of the free memory.

All of them run at once with 80 GB of free memory.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.processes import run_processes

NUM_RUNS = 200
#: Memory of a run's supervisor, rank and sampler, without shared pages.
_RUN_MB = 200
_LIMIT_S = 3000.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]


def max_concurrent_runs() -> int:
    """Return the number of runs that fit into half of the free memory."""
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return max(4, min(NUM_RUNS, int(fields["MemAvailable"].split()[0]) // 2048 // _RUN_MB))


def test_two_hundred_runs_complete_and_are_listed(tmp_path):
    (tmp_path / "train.py").write_text("print('here')\n")
    options = ["--backend", "local", "--ntasks-per-node", "1", "--no-code-snapshot"]
    submitted, at_once, deadline = 0, max_concurrent_runs(), time.monotonic() + _LIMIT_S
    most_running = 0
    while True:
        command = [sys.executable, "-m", "hpctrain", "list", "--json"]
        listed = json.loads(run_command(command, cwd=tmp_path).stdout)
        states = Counter(status["state"] for status in listed)
        assert len(listed) == submitted
        assert set(states) <= {"RUNNING", "COMPLETED"}, states
        most_running = max(most_running, states["RUNNING"])
        if states["COMPLETED"] == NUM_RUNS:
            break
        assert time.monotonic() < deadline, states
        for _ in range(min(at_once - states["RUNNING"], NUM_RUNS - submitted)):
            command = ["submit", *options, "--run-dir", f"runs/run-{submitted:03d}", "train.py"]
            run_command([sys.executable, "-m", "hpctrain", *command], cwd=tmp_path)
            submitted += 1
        time.sleep(0.5)
    print(f"{NUM_RUNS} runs, at most {most_running} at once")
    processes = [
        process
        for number in range(NUM_RUNS)
        for process in run_processes(tmp_path / f"runs/run-{number:03d}")
    ]
    assert processes == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "train.py"]
