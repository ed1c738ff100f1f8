"""What an agent tells torchrun. That it works is seen in tests/e2e/test_torchrun.py."""

from __future__ import annotations

import pytest

from hpctrain.runtime.agent import torchrun_options

PLAN = {"nodes": 2, "ranks_per_node": 4, "backend": "c10d", "endpoint": None, "worker": ["python", "x"]}
ENVIRON = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1234", "SLURM_JOB_ID": "7", "HPCTRAIN_ATTEMPT": "3"}


@pytest.mark.parametrize(
    ("plan", "endpoint", "conf"),
    [
        ({}, "127.0.0.1:1234", "join_timeout=300,is_host=false"),
        ({"backend": "etcd-v2", "endpoint": "etcd:2379"}, "etcd:2379", "join_timeout=300"),
    ],
)
def test_agents_meet_where_the_plan_says(plan, endpoint, conf):
    options = torchrun_options(PLAN | plan, ENVIRON)
    assert {
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf={conf}",
        "--rdzv-id=hpctrain-7-3",
        "--local-addr=127.0.0.1",
        "--nnodes=2",
        "--nproc-per-node=4",
        "--max-restarts=0",
    } <= set(options)
    assert options[-3:] == ["--no-python", "python", "x"]
