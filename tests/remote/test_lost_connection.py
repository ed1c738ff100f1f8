import re
import threading
from collections.abc import Iterator

import pytest
from helpers.ssh_cluster import CuttingProxy, Laptop, SshCluster

pytestmark = [pytest.mark.ranks, pytest.mark.slow]
SUBMIT = ("submit", "--on", "alpha", "--backend", "local", "--run-dir", "runs/a")


@pytest.fixture
def proxy(cluster: SshCluster) -> Iterator[CuttingProxy]:
    """A line that breaks after 60 KB; 500 lines of the logs have 130 KB."""
    proxy = CuttingProxy(cluster.port, limit_bytes=60_000)
    cluster.point_to(proxy.port)
    yield proxy
    proxy.close()


def numbers(text: str, label: str = "") -> list[int]:
    """Return the numbers of the lines that a rank printed."""
    found = re.findall(rf"^{re.escape(label)}line (\d+) é{{20}}x+$", text, re.MULTILINE)
    return [int(number) for number in found]


@pytest.mark.extended
def test_followed_submission_continues_after_each_cut(laptop: Laptop, proxy: CuttingProxy):
    result = laptop.hpctrain(*SUBMIT, "--ntasks-per-node", "1", "--follow", "train.py", "500", timeout=100)
    assert "was lost. Reconnecting" in result.stderr
    assert numbers(result.stdout) == list(range(500))
    assert result.stderr.count("run          a: COMPLETED") == 1


@pytest.mark.long
def test_wait_continues_after_a_cut(laptop: Laptop, proxy: CuttingProxy):
    laptop.hpctrain(*SUBMIT, "--ntasks-per-node", "1", "train.py", "3000")
    threading.Timer(3, proxy.cut).start()
    result = laptop.hpctrain("--on", "alpha", "wait", "a")
    assert "was lost. Reconnecting" in result.stderr
    assert "run          a: COMPLETED" in result.stdout
