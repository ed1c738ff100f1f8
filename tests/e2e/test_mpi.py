"""An MPI program finds its processes through Slurm's MPI plugin."""

from __future__ import annotations

import re

import pytest
from helpers.training_runs import Run

PROGRAM = """
from mpi4py import MPI
world = MPI.COMM_WORLD
print(f"process {world.rank} of {world.size}, sum {world.allreduce(world.rank)}")
"""


@pytest.mark.timeout(200)
def test_processes_of_an_mpi_program_meet(slurm, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    run = Run(tmp_path / "run", slurm.env)
    # One node, because PMIx's servers of several pretend nodes on one machine use the same files.
    shape = ["--ntasks-per-node=4", "--mpi=pmix"]
    run.hpctrain("submit", *shape, "--run-dir", str(run.path), "program.py", cwd=tmp_path)
    assert run.wait() == 0, run.describe()
    for rank in range(4):
        assert re.search(r"process \d of 4, sum 6", run.dir.rank_log(0, rank).read_text())
