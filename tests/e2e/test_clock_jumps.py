"""Clock jumps of minutes and hours while a run trains and between its attempts.

The machine's clock stays unchanged: the run's processes get another `time.time` and `time.monotonic`. File
times do not follow, as on a file server with its own clock.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import REPOSITORY, SCRIPTS
from helpers.commands import environment, run_command
from helpers.processes import assert_no_process_left
from helpers.training_runs import JOB, Run, assert_undisturbed, submit

CLOCKS = SCRIPTS / "shifted_clocks"
SHAPE = ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "1", "--set", "node_check=never"]
HOUR_S = 3600.0

pytestmark = pytest.mark.timeout(300)


class Clock:
    """The wall clock of the processes that run under `env`."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "clock"
        self.env = {
            "TEST_CLOCK": str(self._path),
            "PYTHONPATH": os.pathsep.join(map(str, (CLOCKS, REPOSITORY))),
        }
        self.set(0)

    def set(self, seconds: float) -> None:
        new = self._path.with_name("clock.new")
        new.write_text(str(seconds))
        new.rename(self._path)


@pytest.fixture
def clock(tmp_path) -> Clock:
    return Clock(tmp_path)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Run:
    run = submit(tmp_path_factory.mktemp("reference") / "run", {}, SHAPE, step_s=0.0)
    assert run.wait() == 0
    return run


def assert_time_accounted(run: Run) -> None:
    """The report accounts for all time, and no part is negative."""
    report = json.loads(run.hpctrain("report", str(run.path), "--json").stdout)
    parts = [part["us"] for part in report["ledger"]]
    assert min(parts) >= 0
    assert sum(parts) == report["wall_us"]
    assert 0 <= report["ettr"] <= 1


def run_show_commands(run: Run) -> None:
    """Run each command that shows the run, under the real clock."""
    for args in (
        ["status", str(run.path)],
        ["list"],
        ["logs", str(run.path)],
        ["checkpoints", str(run.path)],
    ):
        run.hpctrain(*args)
    run.hpctrain("top", "--once", str(run.path))


@pytest.mark.long
@pytest.mark.parametrize(
    "jumps", [(90, -90, 300), (3 * HOUR_S, -2 * HOUR_S, 0), (-24 * HOUR_S, 48 * HOUR_S, -1)]
)
def test_wall_clock_jumps_during_training_do_no_harm(reference, clock, tmp_path, jumps):
    options = ["--hang-timeout", "20"]
    run = submit(tmp_path / "run", clock.env, SHAPE, options=options, step_s=0.15, slow_attempts=2)
    for step, seconds in zip((8, 16, 30), jumps, strict=True):
        run.wait_for_step(step)
        clock.set(seconds)
        run_show_commands(run)
        if step == 16:
            run.kill_rank(1)
    assert run.wait() == 0
    assert_undisturbed(run, reference)
    (failure,) = run.events("failure")
    assert failure["rank"] == 1
    assert "SIGKILL" in failure["cause"]
    assert len(run.events("restart")) == 1
    run_show_commands(run)
    assert_time_accounted(run)
    assert_no_process_left(run.path)


@pytest.mark.long
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
    assert run.status()["state"] == "COMPLETED"
    assert_undisturbed(run, reference)
    assert_time_accounted(run)


@pytest.mark.long
def test_hang_is_detected_with_differing_monotonic_clocks(clock, tmp_path):
    """Nothing else is; each host counts its monotonic clock from its own boot."""
    run = Run(tmp_path / "run", clock.env)
    options = [*SHAPE, "--hang-timeout", "3", "--run-dir", str(run.path), str(JOB)]
    run.hpctrain("submit", *options, "--checkpoint-every", "6", "--hang", "loop", "--epochs", "2")
    run.wait_for_step(4)
    clock.set(-HOUR_S)
    assert run.wait() == 0
    (failure,) = run.events("failure")
    assert (failure["class"], failure["rank"]) == ("hang", 1)


@pytest.fixture
def later_boot() -> Iterator[list[str]]:
    """The command prefix of a namespace whose monotonic clock is a week ahead."""
    command = ["unshare", "--time", "--monotonic", "604800", "--boottime", "604800", "--fork"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("no time namespace can be made here")
    return command


@pytest.mark.long
def test_run_resumes_after_a_reboot(reference, later_boot, tmp_path):
    """A reboot means another monotonic clock for each process of the second submission."""
    run = submit(tmp_path / "run", {}, SHAPE, step_s=0.1)
    run.wait_for_step(14)
    run.hpctrain("cancel", str(run.path))
    run.wait()
    command = ["submit", *SHAPE, "--run-dir", str(run.path), str(JOB), "--checkpoint-every", "6"]
    run_command([*later_boot, sys.executable, "-m", "hpctrain", *command], environment())
    assert run.wait() == 0
    assert_undisturbed(run, reference)
    assert_time_accounted(run)
