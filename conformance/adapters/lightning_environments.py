"""Let Lightning's environments take their ranks from hpctrain's detection."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import MPIEnvironment, SLURMEnvironment, TorchElasticEnvironment

from hpctrain.cluster import Ranks, detect, expand_hostlist

FIELDS = ("world_size", "local_rank", "node_rank")


def _ranks() -> Ranks:
    """Detect the ranks after adding what Slurm and torchrun always set, but the tests leave out."""
    environ = dict(os.environ)
    if "SLURM_NODELIST" in environ:
        nodes = expand_hostlist(environ["SLURM_NODELIST"].replace(", ", ","))
        tasks = environ.get("SLURM_NTASKS_PER_NODE", "1")
        environ = {
            **dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_ID"), "0"),
            "SLURM_JOB_ID": "1",
            "SLURM_STEP_NUM_TASKS": str(len(nodes) * int(tasks)),
            "SLURM_STEP_TASKS_PER_NODE": f"{tasks}(x{len(nodes)})",
            "SLURMD_NODENAME": nodes[0],
            **environ,
            "SLURM_STEP_NODELIST": environ["SLURM_NODELIST"],
        }
    if "GROUP_RANK" in environ:
        environ = {"LOCAL_WORLD_SIZE": "5", "GROUP_WORLD_SIZE": "4", **environ}
    return detect(environ)


def _detect(environment: str) -> bool:
    return detect(os.environ).environment == environment


for owner, environment in ((SLURMEnvironment, "slurm"), (TorchElasticEnvironment, "torchrun")):
    for name in FIELDS:
        setattr(owner, name, lambda _, name=name: getattr(_ranks(), name))
    owner.global_rank = lambda _: _ranks().rank
    owner.main_address = property(lambda _: _ranks().master_addr)
    owner.main_port = property(lambda _: _ranks().master_port)
    owner.detect = staticmethod(lambda environment=environment: _detect(environment))


def _mpi_ranks() -> Ranks:
    """Detect the ranks of a process whose variables agree with the communicator of mpi4py."""
    from mpi4py import MPI

    rank, size = (str(int(value())) for value in (MPI.COMM_WORLD.Get_rank, MPI.COMM_WORLD.Get_size))
    variables = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return detect({f"OMPI_COMM_WORLD_{name}": value for name, value in variables.items()})


# The other values are those of MPI itself.
MPIEnvironment.world_size = lambda _: _mpi_ranks().world_size
MPIEnvironment.global_rank = lambda _: _mpi_ranks().rank
