"""A rank whose last collective is still finishing when its script ends exits without an abort."""

import subprocess
import sys

import pytest

EXCHANGES = """
import atexit, torch, torch.distributed as dist
from hpctrain.runtime.release_devices import shut_down_process_group, drain_gloo_threads
{leave}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(100):
    dist.all_reduce(torch.ones(50_000), async_op=True)
"""


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.parametrize(
    "leave",
    [
        "atexit.register(shut_down_process_group)",
        pytest.param("atexit.register(drain_gloo_threads)", marks=pytest.mark.long),
    ],
)
def test_pending_tensors_do_not_abort_the_exit(leave):
    for _ in range(2):
        script = EXCHANGES.format(leave=leave)
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
        assert (result.returncode, result.stderr) == (0, "")
