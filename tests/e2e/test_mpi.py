"""An MPI program finds its processes through Slurm's MPI plugin."""

import re
from ctypes.util import find_library

import pytest
from helpers.training_runs import Run

#: Sum of all ranks. Without mpi4py, because Lightning would start MPI in every test if that were installed.
PROGRAM = """
from ctypes import CDLL, RTLD_GLOBAL, addressof, byref, c_char, c_int, c_void_p
mpi = CDLL("libmpi.so.40", mode=RTLD_GLOBAL)
def constant(name):
    return c_void_p(addressof(c_char.in_dll(mpi, name)))
world, rank, size, total = constant("ompi_mpi_comm_world"), c_int(), c_int(), c_int()
mpi.MPI_Init(None, None)
mpi.MPI_Comm_rank(world, byref(rank))
mpi.MPI_Comm_size(world, byref(size))
mpi.MPI_Allreduce(byref(rank), byref(total), 1, constant("ompi_mpi_int"), constant("ompi_mpi_op_sum"), world)
print(f"process {rank.value} of {size.value}, sum {total.value}", flush=True)
mpi.MPI_Finalize()
"""


@pytest.mark.timeout(200)
@pytest.mark.skipif(find_library("mpi") is None, reason="needs Open MPI (scripts/install_for_tests.sh)")
def test_processes_of_an_mpi_program_meet(slurm, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    run = Run(tmp_path / "run", slurm.env)
    # One node, because PMIx's servers of several pretend nodes on one machine use the same files.
    shape = ["--ntasks-per-node=4", "--mpi=pmix"]
    run.hpctrain("submit", *shape, "--run-dir", str(run.path), "program.py", cwd=tmp_path)
    assert run.wait() == 0, run.describe()
    for rank in range(4):
        assert re.search(r"process \d of 4, sum 6", run.dir.rank_log(0, rank).read_text())
