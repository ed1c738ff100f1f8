"""Classify a rank's failure from messages of the rank, PyTorch, the kernel and the GPU driver."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable

from hpctrain.crash_output import UNFINISHED
from hpctrain.errors import DataWorkerKilled, DiskFull, RendezvousError
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir, is_metrics
from hpctrain.spec.restart_policy import EndKind
from hpctrain.supervisor.failures.failure_files import RankFailure

#: Messages of CUDA and the driver for faults of the device itself (CUDA Runtime API, cudaError_t 46, 100, 214
#: and others). Illegal addresses are excluded: these are faults of a kernel, and thus of the script.
_GPU = re.compile(
    r"uncorrectable|\becc\b.*error|\bxid\b|fallen off the bus|gpu is lost|hardware stack error"
    r"|nvlink.*error|device(?:\(s\))? is/are busy or unavailable|devices? unavailable|no cuda-capable device",
    re.IGNORECASE,
)
_GPU_OOM = re.compile(r"cuda out of memory|cublas_status_alloc_failed|hip out of memory", re.IGNORECASE)
_OOM = re.compile(r"can't allocate memory|cannot allocate memory|\bbad_alloc\b", re.IGNORECASE)
_COLLECTIVE = re.compile(
    r"\bncc?l\b.*(?:error|timeout|timed out|abort)|\bgloo\b.*(?:error|timeout|timed out)"
    r"|enforce fail at .*\bgloo\b",
    re.IGNORECASE,
)

#: Xids of the device, its memory or its links, not of a kernel: they require a reset of the GPU or an
#: inspection of the node (NVIDIA, "XID Errors", the table of actions).
HARDWARE_XIDS = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 120, 140})
#: Number of newest lines of a node's file to search after an attempt.
_LINES = 200

_NUMBER = re.compile(r"\d{1,18}")

#: Exception classes of failed communication.
_COMMUNICATION = frozenset(
    {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError", RendezvousError.__name__}
)
#: Exception classes caused by the environment, which may not recur in the next attempt.
_MAY_PASS = frozenset(
    {"OSError", "EOFError", "DistError", "AcceleratorError", "CheckpointError", RendezvousError.__name__}
)


def classify(failure: RankFailure) -> EndKind:
    """Return the kind of a root-cause failure. `USER_ERROR` is determined elsewhere."""
    text = f"{failure.error}: {failure.message}"
    classes = {failure.error, *failure.classes}
    if failure.kind == UNFINISHED:
        return EndKind.UNFINISHED
    if failure.corruption is not None:
        return EndKind.CORRUPTION
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
    if DataWorkerKilled.__name__ in classes:
        return EndKind.KILLED if signal.SIGKILL.name in failure.message else EndKind.SIGNAL
    if failure.kind == "signal" and failure.error == signal.SIGKILL.name:
        return EndKind.KILLED
    if failure.is_peer_lost or classes & _COMMUNICATION or _COLLECTIVE.search(text):
        return EndKind.COMMUNICATION
    if failure.kind == "signal":
        return EndKind.SIGNAL
    return EndKind.OOM if _OOM.search(text) else EndKind.PYTHON


def is_deterministic(failure: RankFailure) -> bool:
    """Return true if the class of the exception suggests that the next attempt would fail in the same way."""
    return failure.kind == "exception" and not _MAY_PASS.intersection(failure.classes)


def gpu_faults(run: RunDir, hosts: Iterable[str], since: float) -> dict[str, list[int]]:
    """Return the Xids that the devices of each node reported since a time, in seconds since the epoch."""
    names = {_short(host): host for host in hosts}
    faults: dict[str, list[int]] = {}
    for path in run.all_telemetry():
        for _, line in zip(range(_LINES), read_last_records(path, is_metrics), strict=False):
            host = names.get(_short(str(line.get("host"))))
            if host is None or float(line.get("time", 0.0)) < since:
                break
            if xids := HARDWARE_XIDS.intersection(_numbers(line.get("gpu_xids"))):
                faults.setdefault(host, []).extend(xids)
    return faults


def _short(host: str) -> str:
    """Return a host's name without its domain, which Slurm's node name may lack."""
    return host.partition(".")[0]


def _numbers(value: object) -> list[int]:
    return [int(number) for number in _NUMBER.findall(str(value or ""))]
