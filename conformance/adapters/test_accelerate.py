"""Accelerate's scripts that check a launcher, on the ranks of a local run."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPTS = ("test_script", "test_sync", "test_ops", "test_distributed_data_loop")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("script", SCRIPTS)
def test_check_on_ranks(tmp_path, script, ranks):
    hpctrain = [sys.executable, "-m", "hpctrain"]
    options = ["--backend=local", "--run-dir=run", "--follow", "--hang-timeout=60", "--max-failures=1"]
    shape = [f"--nodes={ranks // 2}", "--ntasks-per-node=2", "--env=ACCELERATE_USE_CPU=true"]
    program = ["-m", f"accelerate.test_utils.scripts.{script}"]
    try:
        subprocess.run(
            [*hpctrain, "submit", *options, *shape, *program], cwd=tmp_path, check=True, timeout=280
        )
    finally:
        subprocess.run([*hpctrain, "cancel", "run"], cwd=tmp_path, check=False, timeout=60)
