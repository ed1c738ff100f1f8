"""Jobs of a real Slurm that end, or never start, without a supervisor to report it."""

import os
import sys

import pytest
from helpers.commands import environment, run_command

_SCRIPT = "print('trained')\n"


@pytest.fixture
def hpctrain(slurm, tmp_path):
    (tmp_path / "train.py").write_text(_SCRIPT)
    environ = environment(slurm.env)

    def call(*args):
        command = [sys.executable, "-m", "hpctrain", *args]
        return run_command(command, environ, cwd=tmp_path, check=False, timeout=60)

    return call


@pytest.mark.extended
@pytest.mark.parametrize("script", ["train.py", "job.sbatch"])
@pytest.mark.parametrize(
    ("setup", "message", "tail"),
    [
        ("echo why >&2; false", "Slurm reports FAILED before any rank started", "why"),
        ("echo so long; exit 0", "Slurm reports COMPLETED, but its batch script exited before", "so long"),
    ],
)
def test_output_of_a_failed_batch_script_is_shown(hpctrain, tmp_path, script, setup, message, tail):
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\n#SBATCH --output=out-%j.txt\ntrue\n")
    followed = hpctrain("submit", "--run-dir", "runs/r", "--time", "5", "--setup", setup, "--follow", script)
    assert (followed.returncode, message in followed.stderr) == (4, True)
    for output in (
        followed.stderr,
        hpctrain("status", "r").stdout,
        hpctrain("logs", "r").stderr,
        hpctrain("logs", "r", "--errors").stdout,
    ):
        assert f"  {tail}\n" in output
        assert os.path.join("logs", "slurm.log") in output


@pytest.mark.parametrize("array", [(), ("--array", "0-1")], ids=["run", "array"])
def test_wait_ends_for_a_run_that_can_never_start(hpctrain, slurm, array):
    """The job it depends on is fine at submission, so only Slurm's later state shows the problem."""
    hold = ["sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap=true"]
    job = run_command(hold, slurm.env).stdout.strip()
    submit = ("submit", "--run-dir", "runs/r", "--time", "5", "--dependency", f"afternotok:{job}", *array)
    try:
        assert hpctrain(*submit, "train.py").returncode == 0
        run_command(["scontrol", "release", job], slurm.env)
        waited = hpctrain("wait", "r")
        assert (waited.returncode, "run r will never start" in waited.stderr) == (3, True)
        followed = hpctrain("logs", "-f", "r")
        assert (followed.returncode, "run r will never start" in followed.stderr) == (3, True)
    finally:
        hpctrain("cancel", "r")
