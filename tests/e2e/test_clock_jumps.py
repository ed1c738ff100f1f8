"""Clock jumps of minutes and hours while a run trains and between its attempts.

The machine's clock stays unchanged: the run's processes get another `time.time` and `time.monotonic`. File
times do not follow, as on a file server with its own clock.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from helpers import REPOSITORY, SCRIPTS
from helpers.training_runs import Run, assert_undisturbed, submit

SHAPE = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "1", "--set", "node_check=never"]
HOUR_S = 3600.0

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


class Clock:
    """The wall clock of the processes that run under `env`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "clock"
        paths = (SCRIPTS / "shifted_clocks", REPOSITORY)
        self.env = {"TEST_CLOCK": str(self._path), "PYTHONPATH": os.pathsep.join(map(str, paths))}
        self.set(0)

    def set(self, seconds: float) -> None:
        new = self._path.with_name("clock.new")
        new.write_text(str(seconds))
        new.rename(self._path)


@pytest.fixture
def clock(tmp_path) -> Clock:
    return Clock(tmp_path)


def assert_time_accounted(run: Run) -> None:
    """The report accounts for all time, and no part is negative."""
    report = json.loads(run.hpctrain("report", str(run.path), "--json").stdout)
    parts = [part["us"] for part in report["ledger"]]
    assert min(parts) >= 0
    assert sum(parts) == report["wall_us"]
    assert 0 <= report["ettr"] <= 1


@pytest.mark.parametrize("jumps", [(90, -90, 300), (-24 * HOUR_S, 48 * HOUR_S, -1)])
def test_wall_clock_jumps_during_training_do_no_harm(reference, clock, tmp_path, jumps):
    options = ["--hang-timeout", "20"]
    run = submit(tmp_path / "run", clock.env, SHAPE, options=options, step_s=0.15, slow_attempts=2)
    for step, seconds in zip((8, 16, 30), jumps, strict=True):
        run.wait_for_step(step)
        clock.set(seconds)
        for command in (["status"], ["logs"], ["checkpoints"], ["top", "--once"]):
            run.hpctrain(*command, str(run.path))
        if step == 16:
            run.kill_rank(1)
    assert run.wait() == 0
    assert_undisturbed(run, reference(2))
    (failure,) = run.events("failure")
    assert (failure["rank"], "SIGKILL" in failure["cause"]) == (1, True)
    assert len(run.events("restart")) == 1
    assert_time_accounted(run)


@pytest.mark.parametrize("seconds", [-5 * HOUR_S, 5 * HOUR_S])
def test_wall_clock_jump_between_submissions_does_no_harm(reference, clock, tmp_path, seconds):
    run = submit(tmp_path / "run", clock.env, SHAPE, step_s=0.1)
    run.wait_for_step(14)
    run.hpctrain("cancel", str(run.path))
    run.wait()
    clock.set(seconds)
    assert run.status()["state"] == "CANCELLED"
    submit(run.path, clock.env, SHAPE, step_s=0.0)
    assert run.wait() == 0
    assert_undisturbed(run, reference(2))
    assert_time_accounted(run)
