"""The GPUs of this machine, as the driver counts them."""

from __future__ import annotations

from collections.abc import Mapping


def count_gpus(environ: Mapping[str, str]) -> int:
    """The number of GPUs that a process with these variables can use; 0 where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        installed = int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return installed
    # CUDA stops reading the list at the first entry that names no device.
    named = 0
    for entry in visible.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        named += 1
    return min(installed, named)
