from __future__ import annotations

import re

import pytest
from helpers.ssh_cluster import CuttingProxy, Laptop, SshCluster

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
LOCAL = ("--backend", "local", "--ntasks-per-node")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_logs_continue_after_each_cut(laptop: Laptop, cluster: SshCluster, num_ranks: int):
    proxy = CuttingProxy(cluster.port)
    cluster.point_to(proxy.port)
    try:
        laptop.hpctrain(
            "submit",
            "--on",
            "alpha",
            *LOCAL,
            str(num_ranks),
            "--run-dir",
            "runs/a",
            "--independent-ranks",
            "train.py",
            "500",
        )
        proxy.cut()
        proxy.set_limit(60_000)
        result = laptop.hpctrain("--on", "alpha", "logs", "-f", "a", timeout=100)
    finally:
        proxy.close()
    assert proxy.num_cuts > 2
    assert result.stderr.count("was lost; reconnecting") >= 2
    for rank in range(num_ranks):
        label = f"[{rank}] " if num_ranks > 1 else ""
        lines = re.findall(rf"^{re.escape(label)}line (\d+) é{{20}}x+$", result.stdout, re.MULTILINE)
        assert lines == [str(number) for number in range(500)]
