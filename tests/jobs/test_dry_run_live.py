"""Dry runs of jobs that a real Slurm would reject."""

from __future__ import annotations

import sys

import pytest
from helpers.commands import environment, run_command


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ((), 0),
        (("--dependency", "afterany:1"), 0),
        (("--licenses", "foo"), 3),
        (("--mem", "1G", "--mem-per-cpu", "1G"), 3),
        (("--nodelist", "pytest", "--exclude", "pytest"), 3),
        (("--gres", "foo:2"), 3),
        (("--begin", "nonsense"), 3),
        (("--mem", "4Q"), 3),
    ],
)
def test_dry_run_exits_like_the_submission_would(slurm, tmp_path, options, code):
    (tmp_path / "t.py").touch()
    command = [sys.executable, "-m", "hpctrain", "submit", "--dry-run", "--time", "5", *options, "t.py"]
    result = run_command(command, environment(slurm.env), cwd=tmp_path, check=False)
    assert result.returncode == code, result.stderr
    assert result.stdout.startswith("#!/bin/bash")
    assert ("Error: Slurm would reject this job: sbatch failed: " in result.stderr) == (code == 3)
