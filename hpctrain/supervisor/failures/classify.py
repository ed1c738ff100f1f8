"""Classification of a rank's failure from messages of the rank, PyTorch and the kernel."""

from __future__ import annotations

import re
import signal

from hpctrain.crash_output import UNFINISHED
from hpctrain.errors import DiskFull, RendezvousError
from hpctrain.spec.restart_policy import EndKind
from hpctrain.supervisor.failures.failure_files import RankFailure

#: Messages of CUDA and the driver if the device itself is at fault (CUDA Runtime API, cudaError_t 46, 100,
#: 214 and others). An illegal address is not among them: it is the fault of a kernel, and so of a script.
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

#: Exception classes of failed communication.
_COMMUNICATION = frozenset(
    {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", RendezvousError.__name__}
)
#: Exception classes that may not recur at another start, because the environment was at fault.
_MAY_PASS = frozenset(
    {"OSError", "EOFError", "DistError", "AcceleratorError", "CheckpointError", RendezvousError.__name__}
)


def classify(failure: RankFailure) -> EndKind:
    """Return the kind of a root-cause failure. `USER_ERROR` is determined elsewhere."""
    text = f"{failure.error}: {failure.message}"
    classes = {failure.error, *failure.classes}
    if failure.kind == UNFINISHED:
        return EndKind.UNFINISHED
    if "Unauthenticated" in classes:
        return EndKind.UNAUTHENTICATED
    if DiskFull.__name__ in classes:
        return EndKind.DISK_FULL
    if failure.out_of_memory or "MemoryError" in classes:
        return EndKind.OOM
    if "OutOfMemoryError" in classes or _GPU_OOM.search(text):
        return EndKind.GPU_OOM
    if _GPU.search(text):
        return EndKind.GPU
    if failure.kind == "signal" and failure.error == signal.SIGKILL.name:
        return EndKind.KILLED
    if failure.is_peer_lost or classes & _COMMUNICATION or _NCCL.search(text):
        return EndKind.NCCL
    if failure.kind == "signal":
        return EndKind.SIGNAL
    return EndKind.OOM if _OOM.search(text) else EndKind.PYTHON


def is_deterministic(failure: RankFailure) -> bool:
    """True if the class of the exception suggests that the same start would end the same way."""
    return failure.kind == "exception" and not _MAY_PASS.intersection(failure.classes)
