"""Time of `hpctrain.detect` in a job of 16,384 ranks.

    python benchmarks/detect.py [--rounds N]

The variables are those that srun sets for a task, for 2,048 scattered nodes of a busy cluster with about
eight tasks each.
"""

from __future__ import annotations

import random
import sys
import time
from itertools import groupby

from results import Results

from hpctrain.cluster import compress_hostlist, detect

NUM_NODES, TASKS_PER_NODE = 2048, 8
NUM_TASKS = NUM_NODES * TASKS_PER_NODE


def variables() -> tuple[dict[str, str], dict[str, int]]:
    """Return the variables that srun sets for a task, and the expected ranks."""
    chance = random.Random(1)
    nodes = [f"n{node:05}" for node in sorted(chance.sample(range(1, 2 * NUM_NODES), NUM_NODES))]
    tasks = [TASKS_PER_NODE] * NUM_NODES
    for node in range(0, NUM_NODES, 32):
        tasks[node] -= 1
        tasks[node + chance.randrange(1, 32)] += 1
    runs = [(count, len(list(run))) for count, run in groupby(tasks)]
    node_rank = 1536
    rank = sum(tasks[:node_rank]) + 3
    nodelist = compress_hostlist(nodes)
    per_node = ",".join(f"{count}(x{length})" if length > 1 else str(count) for count, length in runs)
    environ = {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(TASKS_PER_NODE))),
        "SLURMD_NODENAME": nodes[node_rank],
        "SLURM_CLUSTER_NAME": "big",
        "SLURM_CPUS_ON_NODE": "128",
        "SLURM_DISTRIBUTION": "block",
        "SLURM_GTIDS": ",".join(str(rank - 3 + task) for task in range(tasks[node_rank])),
        "SLURM_JOBID": "4711",
        "SLURM_JOB_CPUS_PER_NODE": f"128(x{NUM_NODES})",
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": nodelist,
        "SLURM_JOB_NUM_NODES": str(NUM_NODES),
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
        "SLURM_LOCALID": "3",
        "SLURM_NNODES": str(NUM_NODES),
        "SLURM_NODEID": str(node_rank),
        "SLURM_NODELIST": nodelist,
        "SLURM_NPROCS": str(NUM_TASKS),
        "SLURM_NTASKS": str(NUM_TASKS),
        "SLURM_PROCID": str(rank),
        "SLURM_STEPID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": nodelist,
        "SLURM_STEP_NUM_NODES": str(NUM_NODES),
        "SLURM_STEP_NUM_TASKS": str(NUM_TASKS),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_TASKS_PER_NODE": per_node,
        "SLURM_TASK_PID": "12345",
    }
    expected = {
        "rank": rank,
        "world_size": NUM_TASKS,
        "local_rank": 3,
        "local_world_size": tasks[node_rank],
        "node_rank": node_rank,
        "num_nodes": NUM_NODES,
    }
    return environ, expected


def main() -> None:
    results = Results(__doc__)
    results.parser.add_argument("--rounds", type=int, default=100)
    options = results.parse()
    environ, expected = variables()
    times = []
    for _ in range(options.rounds):
        start = time.perf_counter()
        ranks = detect(environ)
        times.append((time.perf_counter() - start) * 1000)
        wrong = {name: getattr(ranks, name) for name in expected if getattr(ranks, name) != expected[name]}
        if wrong:
            sys.exit(f"detect returned {wrong}, but the expected values are {expected}")
    results.add("first call", times[0], "ms")
    results.add("any call", times, "ms", limit=20.0)
    results.finish()


if __name__ == "__main__":
    main()
