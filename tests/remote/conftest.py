import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.ssh_cluster import Laptop, SshCluster, need_ssh, started

TRAIN = """
import sys, time
print("args", sys.argv[1:])
for line in range(int(sys.argv[1]) if len(sys.argv) > 1 else 0):
    print("line", line, "é" * 20 + "x" * 200, flush=True)
    time.sleep(0.002)
"""


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Laptop]:
    need_ssh()
    laptop = Laptop(tmp_path)
    (laptop.project / "train.py").write_text(TRAIN)
    yield laptop
    shutil.rmtree(laptop.sockets)


@pytest.fixture
def cluster(laptop: Laptop) -> Iterator[SshCluster]:
    with started(SshCluster(laptop, "alpha")) as cluster:
        yield cluster
