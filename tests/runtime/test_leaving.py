"""A rank whose last exchange is hardly over when its script ends leaves without being aborted."""

from __future__ import annotations

import subprocess
import sys

import pytest

EXCHANGES = """
import atexit, torch, torch.distributed as dist
from hpctrain.runtime.gloo_shutdown import shut_down_process_group, drain_gloo_threads
{leave}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(100):
    dist.all_reduce(torch.ones(50_000), async_op=True)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    "leave", ["atexit.register(shut_down_process_group)", "atexit.register(drain_gloo_threads)"]
)
def test_tensors_that_only_the_exchange_still_holds_abort_nothing(leave):
    for _ in range(2):
        script = EXCHANGES.format(leave=leave)
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_without_torch_nothing_is_waited_for():
    script = (
        "import sys; from hpctrain.runtime.gloo_shutdown import *\n"
        "shut_down_process_group(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
