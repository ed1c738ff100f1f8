"""Let Lightning's environments take their ranks from hpctrain's detection."""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

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
