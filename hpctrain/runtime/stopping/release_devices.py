"""Release the devices of a stopped rank without interrupting an exchange with other ranks."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

from hpctrain.runtime.gloo_shutdown import shut_down_process_group


def release_devices(limit_s: float) -> None:
    """Complete the work on the devices, then destroy the idle communicators. Gives up after the time limit.

    A process that ends inside a collective may leave the links between GPUs in a faulty state.
    """
    if "torch" in sys.modules:
        # A lost peer may block both calls.
        thread = threading.Thread(target=_release, name="hpctrain-release", daemon=True)
        thread.start()
        thread.join(limit_s)


def _release() -> None:
    torch = sys.modules["torch"]
    with suppress(Exception):  # The communicators of a faulty device are not idle.
        if torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                # Another device would get a context, and need memory for it.
                if torch._C._cuda_hasPrimaryContext(device):
                    torch.cuda.synchronize(device)
        if "torch.distributed" in sys.modules:
            shut_down_process_group()
