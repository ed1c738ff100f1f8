"""A dry run renders the batch script where no Slurm answers, and names what was not checked."""

from __future__ import annotations

import sys

import pytest
from helpers.commands import run_command

HPCTRAIN = [sys.executable, "-m", "hpctrain", "submit", "--backend=slurm", "--nodes=2", "--time=10"]


@pytest.fixture
def workdir(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sinfo").symlink_to("/bin/false")
    (tmp_path / "bin" / "sbatch").symlink_to("/bin/false")
    return tmp_path


@pytest.mark.parametrize(("folder", "reason"), [("bin", "sinfo failed"), ("none", "sbatch not found")])
def test_dry_run_without_slurm(workdir, folder, reason):
    env = {"PATH": str(workdir / folder)}
    done = run_command([*HPCTRAIN, "--dry-run", "train.py"], env, cwd=workdir)
    assert "#SBATCH --nodes=2" in done.stdout
    assert f"Warning: Slurm cannot be used on this machine ({reason}" in done.stderr
    assert "not checked: the partition and its limits" in done.stderr
    assert "Also unknown: the CPUs per rank (--cpus-per-task).\n" in done.stderr
    headline = [*HPCTRAIN[:5], "--nodes=4", "--gpus-per-node=8", "--dry-run", "train.py"]
    unknown = "Also unknown: the CPUs per rank (--cpus-per-task) and the default time limit (--time)."
    assert unknown in run_command(headline, env, cwd=workdir).stderr
    assert run_command([*HPCTRAIN, "train.py"], env, cwd=workdir, check=False).returncode == 3


def test_options_are_checked_without_slurm(workdir):
    env = {"PATH": str(workdir / "none")}
    done = run_command([*HPCTRAIN, "--dry-run", "--nodes=0", "train.py"], env, cwd=workdir, check=False)
    assert done.returncode == 2
    assert "nodes" in done.stderr
