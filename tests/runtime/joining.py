"""One rank for test_join.py: joins, adds up the ranks' numbers, and tells what it saw, as a line of JSON."""

import json
import os

import torch
import torch.distributed as dist

from hpctrain import detect
from hpctrain.runtime.process_group import join

ranks = detect(os.environ)
team = join(ranks, os.environ)
numbers = torch.tensor([float(ranks.rank), 1.0])
if team.is_distributed:
    dist.all_reduce(numbers)
print(
    json.dumps(
        {
            "job": os.environ.get("SLURM_JOB_ID"),
            "step": os.environ.get("SLURM_STEP_ID"),
            "sum": numbers.tolist(),
            "gloo": os.environ.get("GLOO_SOCKET_IFNAME"),
        }
    ),
    flush=True,
)
