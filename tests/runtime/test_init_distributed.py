"""`init_distributed` without a supervisor, in steps of a real Slurm."""

from __future__ import annotations

import sys

import pytest
from helpers import SCRIPTS
from helpers.commands import run_command

from hpctrain.files import read_json_lines


@pytest.mark.ranks
@pytest.mark.long
def test_trainer_under_plain_srun(slurm, tmp_path):
    """No variable tells the ranks where to connect."""
    script = SCRIPTS / "train_classifier.py"
    env = {**slurm.env, "HPCTRAIN_RUN_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = ["srun", "-N2", "-n3", sys.executable, script, "--epochs", "1"]
    run_command(command, env, cwd=tmp_path, timeout=100)
    assert [record["step"] for record in read_json_lines(tmp_path / "metrics.jsonl")] == list(range(1, 14))
    assert len(list((tmp_path / "samples").iterdir())) == 3
