"""One rank for test_init_distributed.py: join, sum the ranks' numbers, and print the results as JSON."""

import json
import os
import resource

import torch
import torch.distributed as dist

from hpctrain import detect
from hpctrain.runtime.distributed_context import init_distributed

resource.setrlimit(resource.RLIMIT_NOFILE, (60, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
ranks = detect(os.environ)
team = init_distributed(ranks, os.environ)
numbers = torch.tensor([float(ranks.rank), 1.0])
if team.is_distributed:
    dist.all_reduce(numbers)
print(
    json.dumps(
        {
            "job": os.environ.get("SLURM_JOB_ID"),
            "step": os.environ.get("SLURM_STEP_ID"),
            "sum": numbers.tolist(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
        }
    ),
    flush=True,
)
