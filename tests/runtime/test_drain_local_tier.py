"""The cleanup of the nodes after a crash, as the supervisor starts it."""

import sys

import pytest
from helpers.commands import run_command
from torch.distributed import TCPStore

from hpctrain.rundir import RUN_DIR_VARIABLE


@pytest.mark.ranks
@pytest.mark.parametrize("tier", ["-", "tier"])
def test_copies_and_checkpoints_of_a_node_are_removed(tmp_path, tier):
    copies, run = tmp_path / "copies", tmp_path / "run"
    for folder in (copies, run):
        folder.mkdir()
    (copies / "000-00000-0").write_bytes(b"an incomplete copy")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "SLURM_PROCID": "0"}
    command = [sys.executable, "-P", "-m", "hpctrain.runtime.drain_local_tier"]
    argv = [*command, tier if tier == "-" else tmp_path / tier, copies, "30"]
    run_command(argv, {**rank, "SLURM_STEP_NUM_TASKS": "1", RUN_DIR_VARIABLE: str(run)})
    assert not copies.exists()
