"""Release the devices of a stopped rank without interrupting an exchange with other ranks."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress

from hpctrain.runtime.gloo_shutdown import shut_down_process_group


def release_devices_within(limit_s: float) -> None:
    """Release the devices in another thread; a lost peer may block it forever."""
    thread = threading.Thread(target=release_devices, name="hpctrain-release", daemon=True)
    thread.start()
    thread.join(limit_s)


def release_devices() -> None:
    """Complete the work on the devices, then destroy the idle communicators.

    A process that ends inside a collective may leave the links between GPUs in a faulty state.
    """
    if (torch := sys.modules.get("torch")) is None:
        return
    with suppress(Exception):
        if torch.cuda.is_initialized():
            for device in range(torch.cuda.device_count()):
                # Another device would get a context, and need memory for it.
                if torch._C._cuda_hasPrimaryContext(device):
                    torch.cuda.synchronize(device)
    with suppress(Exception):
        if "torch.distributed" in sys.modules:
            shut_down_process_group()
