"""Check this rank's node before training: `python -P -m hpctrain.runtime.node_check`.

Each rank tests its resources: a file in the run folder, an unused GPU without memory errors, a small matrix
product, and a sum over all ranks. The supervisor reads the results.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING, Any

from hpctrain.cluster import ENVIRONMENT_VARIABLE, Ranks, detect
from hpctrain.cluster.device_plan import gpu_sharing_reason, gpus_per_task, own_gpus, plan_device
from hpctrain.cluster.processes import die_with_supervisor
from hpctrain.cluster.visible_gpus import is_mig, visible_devices
from hpctrain.errors import EXIT_CONTINUE
from hpctrain.files import make_folder, read_json, write_atomic
from hpctrain.rundir import RunDir, attempt_of
from hpctrain.runtime.release_devices import release_devices_within, shut_down_process_group
from hpctrain.runtime.stopping.agreed_stop import agreement_timeout_s
from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS
from hpctrain.telemetry.sampling.nvml import GpuReader, GpuReading
from hpctrain.text import format_memory, pluralize

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

#: Time limit for all ranks to check their own nodes.
_PEERS_S = 40.0
#: The driver uses some memory on an idle GPU.
_IN_USE_BYTES = 2 * 1024**3
_SIZE = 1024


def main(environ: Mapping[str, str]) -> None:
    begun = time.monotonic()
    run, attempt = attempt_of(environ)
    ranks = detect({**environ, ENVIRONMENT_VARIABLE: "slurm"})
    path = run.node_check_result(attempt, ranks.rank)
    make_folder(path.parent)
    host = environ.get("SLURMD_NODENAME")

    def write(*, durable: bool = True, **result: Any) -> None:
        record = json.dumps({"rank": ranks.rank, "host": host, **result})
        write_atomic(path, f"{record}\n", durable=durable)

    def exit_on_stop(number: int, _frame: FrameType | None) -> None:
        with suppress(OSError):
            write(durable=False, trouble=[], stopped=True)
        release_devices_within(agreement_timeout_s(signal.Signals(number), environ))
        os._exit(EXIT_CONTINUE)

    for number in STOP_SIGNALS:
        signal.signal(number, exit_on_stop)
    with GpuReader(visible_devices(environ)) as reader:
        readings = reader.read()
    gpus = gpus_to_test(ranks, environ, len(readings))
    job = f"{environ.get('SLURM_JOB_ID')}/{environ.get('SLURM_RESTART_COUNT', 0)}"
    before = previous_memory_errors(run, host or "", ranks.local_rank, job, readings)
    shared = gpu_sharing_reason(environ) is not None
    trouble = [
        problem for gpu in gpus for problem in check_gpu(gpu, readings[gpu], before[gpu], shared=shared)
    ]
    task = "matrix product"
    try:
        trouble = trouble or _check_matrix_product(environ, gpus)
        task = "all-reduce"
        trouble = trouble or _check_all_reduce(environ, ranks, gpus)
    except Exception as error:  # noqa: BLE001 (any error means that the node is unusable)
        trouble = [f"the {task} failed: {error}"]
    if trouble:
        _publish_result(environ, "bad")
    write(trouble=trouble, seconds=time.monotonic() - begun)


def gpus_to_test(ranks: Ranks, environ: Mapping[str, str], num_visible: int) -> list[int]:
    """Return the GPUs to test: those of this rank, or all GPUs if it is the only rank on the node."""
    if ranks.local_world_size == 1:
        # CUDA shows a process only the first MIG instance.
        return list(range(min(num_visible, 1) if is_mig(environ) else num_visible))
    if gpus_per_task(environ) > 1:
        return own_gpus(ranks, environ, num_visible)
    index = plan_device(ranks, environ, num_visible).index
    return [] if index is None else [index]


def previous_memory_errors(
    run: RunDir, host: str, local_rank: int, job: str, readings: Sequence[GpuReading]
) -> list[int]:
    """Return the memory errors of each GPU at the first check of this job, and record them at this check."""
    # The driver counts errors since it was loaded: GPUs with earlier errors are usable.
    counts = [reading.ecc_errors or 0 for reading in readings]
    path = run.memory_errors(host, local_rank)
    with suppress(OSError, ValueError, KeyError, TypeError):
        record = read_json(path)
        if record["job"] == job and len(record["errors"]) == len(counts):
            return [int(count) for count in record["errors"]]
    with suppress(OSError):
        write_atomic(path, json.dumps({"job": job, "errors": counts}) + "\n", durable=False)
    return counts


def check_gpu(index: int, gpu: GpuReading, errors_before: int, *, shared: bool = False) -> list[str]:
    """Return the problems of a GPU. A shared GPU may already be in use by a peer."""
    trouble = []
    if (errors := (gpu.ecc_errors or 0) - errors_before) > 0:
        num_errors = pluralize(errors, "uncorrected memory error")
        trouble.append(f"GPU {index}: {num_errors} since the first node check of this job")
    if not shared and (gpu.processes or (gpu.memory or 0) > _IN_USE_BYTES):
        trouble.append(
            f"GPU {index} is in use (processes: {gpu.processes}, memory: {format_memory(gpu.memory)})"
        )
    return trouble


def _check_matrix_product(environ: Mapping[str, str], gpus: list[int]) -> list[str]:
    """Check a product of two matrices with a known result, on each device."""
    import torch

    on_gpu = bool(gpus) and torch.cuda.is_available()
    _publish_result(environ, f"fine, {'cuda' if on_gpu else 'cpu'}")
    trouble = []
    for device in [f"cuda:{index}" for index in gpus] if on_gpu else ["cpu"]:
        matrix = torch.full((_SIZE, _SIZE), 2.0, device=device)
        if wrong := int((matrix @ matrix != 4.0 * _SIZE).sum()):
            trouble.append(f"a matrix product on {device} has {wrong} wrong values")
    return trouble


def _check_all_reduce(environ: Mapping[str, str], ranks: Ranks, gpus: list[int]) -> list[str]:
    """Check a sum over all ranks, if all ranks have found their nodes usable."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    size, rank = ranks.world_size, ranks.rank
    if size == 1:
        return []
    store, keys = _store(environ), [_key(peer) for peer in range(size)]
    store.wait(keys, timedelta(seconds=_PEERS_S))
    results = [store.get(key).decode() for key in keys]
    if "bad" in results:
        return []
    if len(set(results)) > 1:
        on_cpu = results[rank].endswith("cpu")
        return ["this node has no usable GPU, but other nodes do"] if on_cpu else []
    # NCCL does not support two ranks on one GPU.
    with_nccl = results[rank].endswith("cuda") and gpu_sharing_reason(environ) is None
    device = torch.device("cuda", gpus[0]) if with_nccl else torch.device("cpu")
    if with_nccl:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if with_nccl else "gloo",
        store=PrefixStore("node-check-group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_PEERS_S),
    )
    value = torch.ones(1, device=device)
    dist.all_reduce(value)
    total = value.item()
    shut_down_process_group()
    if total == size:
        return []
    return [f"an all-reduce of ones over {size} ranks returned {total:g} instead of {size}"]


def _publish_result(environ: Mapping[str, str], result: str) -> None:
    with suppress(Exception):
        _store(environ).set(_key(int(environ["SLURM_PROCID"])), result)


def _key(rank: int) -> str:
    return f"node-check/{rank}"


def _store(environ: Mapping[str, str]) -> TCPStore:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    timeout = timedelta(seconds=_PEERS_S)
    return TCPStore(*address, is_master=False, wait_for_workers=False, timeout=timeout)


if __name__ == "__main__":
    die_with_supervisor(os.environ)
    main(os.environ)
