"""Release the devices and communicators of a rank without interrupting an exchange with other ranks."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from hpctrain.runtime.rank_activity import in_process_group

#: Name of the torch threads that run gloo's exchanges.
_GLOO_THREAD = "pt_gloo_runloop"
#: First version of torch that is known to name them.
_NAMES_THREADS = "2.13"
#: First version whose process groups can be freed during an exchange; see `keep_process_groups`.
_CAN_FREE_GROUPS = "2.8"
_TASKS = Path("/proc/self/task")
#: This thread sleeps between two checks, so that gloo's threads can acquire the GIL.
_POLL_INTERVAL_S = 0.005
#: Time limit. An exchange with a lost peer also sleeps, and is safe to abandon.
_LIMIT_S = 5.0


def shut_down_process_group(limit_s: float = _LIMIT_S) -> None:
    """Destroy the default process group, if there is one, when its threads are idle, or after the limit."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        drain_gloo_threads(limit_s)
        if torch.__version__ < _CAN_FREE_GROUPS:
            from hpctrain.torch_compat import keep_process_groups

            keep_process_groups()
        dist.destroy_process_group()


def drain_gloo_threads(limit_s: float = _LIMIT_S) -> None:
    """Wait until no gloo thread can still release the tensors of a finished exchange.

    A thread that releases a tensor after the interpreter has shut down aborts the process. The threads are
    idle if all sleep and none has woken since the last check.
    """
    if not _TASKS.exists():
        time.sleep(0.1)
        return
    deadline = time.monotonic() + limit_s
    previous: dict[str, str] | None = None
    while time.monotonic() < deadline:
        counts = _asleep()
        if counts is not None and counts in ({}, previous):
            return
        previous = counts
        time.sleep(_POLL_INTERVAL_S)


def _asleep() -> dict[str, str] | None:
    """Return the count of sleeps of each gloo thread; None if one is awake.

    If torch does not name its threads, any thread that is not Python's may be one.
    """
    counts: dict[str, str] = {}
    any_name = in_process_group() and sys.modules["torch"].__version__ < _NAMES_THREADS
    of_python = {str(thread.native_id) for thread in threading.enumerate()}
    for task in os.listdir(_TASKS):
        try:
            status = (_TASKS / task / "status").read_text(errors="replace")
        except OSError:
            continue  # The thread has ended.
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if task in of_python or not (any_name or fields["Name"] == _GLOO_THREAD):
            continue
        if not fields["State"].startswith("S"):
            return None
        counts[task] = fields["voluntary_ctxt_switches"]
    return counts


def release_devices_within(limit_s: float) -> None:
    """Release the devices in another thread; a lost peer may block it forever."""
    thread = threading.Thread(
        target=release_devices, args=(limit_s / 2,), name="hpctrain-release", daemon=True
    )
    thread.start()
    thread.join(limit_s)


def release_devices(drain_limit_s: float = _LIMIT_S) -> None:
    """Complete the work on the devices, then destroy communicators: a cut collective may harm GPU links."""
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
            shut_down_process_group(drain_limit_s)
