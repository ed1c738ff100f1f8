"""Jobs of a real Slurm that end, or wait for ever, without a supervisor that could say why."""

from __future__ import annotations

import os
import sys

import pytest
from helpers.commands import environment, run_command

_SCRIPT = "print('trained')\n"


@pytest.fixture
def hpctrain(slurm, tmp_path):
    (tmp_path / "train.py").write_text(_SCRIPT)
    environ = environment(slurm.env)

    def call(*words):
        command = [sys.executable, "-m", "hpctrain", *words]
        return run_command(command, environ, cwd=tmp_path, check=False, timeout=60)

    return call


@pytest.mark.parametrize(
    ("setup", "words", "tail"),
    [
        ("echo why >&2; false", "Slurm reports FAILED before any rank started", "why"),
        ("echo so long; exit 0", "Slurm reports COMPLETED, but its batch script exited before", "so long"),
    ],
)
def test_what_the_batch_script_said_before_it_died_is_shown(hpctrain, tmp_path, setup, words, tail):
    followed = hpctrain(
        "submit", "--run-dir", "runs/r", "--time", "5", "--setup", setup, "--follow", "train.py"
    )
    assert (followed.returncode, words in followed.stderr) == (4, True)
    for told in (
        followed.stderr,
        hpctrain("status", "r").stdout,
        hpctrain("logs", "r").stderr,
        hpctrain("logs", "r", "--errors").stdout,
    ):
        assert f"  {tail}\n" in told
        assert os.path.join("logs", "slurm.log") in told


@pytest.mark.parametrize("array", [(), ("--array", "0-1")], ids=["run", "array"])
def test_nobody_waits_for_a_run_that_can_never_start(hpctrain, slurm, array):
    """Slurm's own commands only: that the job it waits for is fine shows after the submission."""
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
