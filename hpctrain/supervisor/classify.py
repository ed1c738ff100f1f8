"""Which kind a rank's failure is of, out of what the rank, torch and the kernel say of it."""

from __future__ import annotations

import re
import signal

from hpctrain.jobs.restart import Kind
from hpctrain.supervisor.failures import Failure

#: What CUDA and the driver say where the device itself is at fault (CUDA Runtime API, cudaError_t 46, 100,
#: 214 and others). An illegal address is left out: that is a kernel's fault, and so a script's.
_GPU = re.compile(
    r"uncorrectable|\becc\b.*error|\bxid\b|fallen off the bus|gpu is lost|hardware stack error"
    r"|nvlink.*error|device(?:\(s\))? is/are busy or unavailable|devices? unavailable|no cuda-capable device",
    re.IGNORECASE,
)
_GPU_OOM = re.compile(r"cuda out of memory|cublas_status_alloc_failed|hip out of memory", re.IGNORECASE)
_OOM = re.compile(r"can't allocate memory|cannot allocate memory|\bbad_alloc\b", re.IGNORECASE)
_NCCL = re.compile(
    r"\bncc?l\b.*(?:error|timeout|timed out|abort)|\bgloo\b.*(?:error|timeout|timed out)", re.IGNORECASE
)

#: Classes of exceptions by which torch speaks of communication.
_COMMUNICATION = frozenset({"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"})
#: Classes whose exceptions another start may not bring about again: the world outside was at fault.
_MAY_PASS = frozenset({"OSError", "EOFError", "DistError", "AcceleratorError", "CheckpointError"})


def classify(failure: Failure) -> Kind:
    """The kind of a failure that is no other's consequence. Whether it is a user's error shows elsewhere."""
    text = f"{failure.error}: {failure.message}"
    classes = {failure.error, *failure.classes}
    if failure.out_of_memory or "MemoryError" in classes:
        return Kind.OOM
    if "OutOfMemoryError" in classes or _GPU_OOM.search(text):
        return Kind.GPU_OOM
    if _GPU.search(text):
        return Kind.GPU
    if failure.kind == "signal" and failure.error == signal.SIGKILL.name:
        return Kind.KILLED
    if failure.is_peer_lost or classes & _COMMUNICATION or _NCCL.search(text):
        return Kind.NCCL
    if failure.kind == "signal":
        return Kind.SIGNAL
    return Kind.OOM if _OOM.search(text) else Kind.PYTHON


def comes_again(failure: Failure) -> bool:
    """Whether the same start would end the same way, as far as the class of the exception tells."""
    return failure.kind == "exception" and not _MAY_PASS.intersection(failure.classes)
