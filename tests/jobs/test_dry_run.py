"""Dry runs without Slurm, and of jobs that a real Slurm would reject."""

import sys

import pytest
from helpers.commands import environment, run_command

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
    (workdir / "job.sbatch").write_text("#!/bin/sh\n#SBATCH --cpus-per-task=3\n")
    adopted = run_command([*HPCTRAIN[:4], "--dry-run", "job.sbatch"], env, cwd=workdir)
    assert "#SBATCH --cpus-per-task=3" in adopted.stdout
    assert "Also unknown: the default time limit (--time).\n" in adopted.stderr
    headline = [*HPCTRAIN[:5], "--nodes=4", "--gpus-per-node=8", "--dry-run", "train.py"]
    unknown = "Also unknown: the CPUs per rank (--cpus-per-task) and the default time limit (--time)."
    done = run_command(headline, env, cwd=workdir)
    assert unknown in done.stderr
    assert "from slurm_templates/ddp.sbatch.j2" in done.stdout
    assert "srun --nodes=4 --ntasks=32 --ntasks-per-node=8" in done.stdout
    assert "#SBATCH --gres=gpu:8\n" in done.stdout
    assert run_command([*HPCTRAIN, "train.py"], env, cwd=workdir, check=False).returncode == 3
    invalid = run_command([*HPCTRAIN, "--dry-run", "--nodes=0", "train.py"], env, cwd=workdir, check=False)
    assert invalid.returncode == 2


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
