from __future__ import annotations

import pytest
from helpers.ssh_cluster import Laptop, SshCluster

pytestmark = pytest.mark.ranks
LOCAL = ("--backend", "local", "--ntasks-per-node", "1")


def test_submits_and_shows_a_run(laptop: Laptop, cluster: SshCluster):
    result = laptop.hpctrain("submit", "--on", "alpha", *LOCAL, "--run-dir", "runs/a", "train.py", "3")
    assert "Run a: job" in result.stdout
    assert "hpctrain --on alpha logs -f a" in result.stdout
    assert laptop.hpctrain("wait", "a", "--on", "alpha").returncode == 0
    assert "line 2" in laptop.hpctrain("--on", "alpha", "logs", "a").stdout
