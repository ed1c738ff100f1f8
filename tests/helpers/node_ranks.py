"""Ranks of a single node."""

from hpctrain.cluster import Ranks


def ranks(local_rank: int = 0, local_world_size: int = 1, environment: str = "slurm") -> Ranks:
    return Ranks(
        rank=local_rank,
        world_size=local_world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=0,
        num_nodes=1,
        master_addr="n1",
        master_port=1,
        environment=environment,
        sources={"local_world_size": "SLURM_STEP_TASKS_PER_NODE"},
    )
