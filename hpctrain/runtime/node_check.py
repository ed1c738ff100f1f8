"""A look at this rank's node before the training starts: `python -P -m hpctrain.runtime.node_check`.

Each rank tries out what it will need: a file in the run folder, its GPU, free and without memory errors, a
small matrix product, and at last a sum over all ranks. The supervisor reads what it writes down.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from hpctrain.cluster import ENVIRONMENT_VARIABLE, Ranks, detect
from hpctrain.cluster.devices import is_mig, plan_device, sharing_allowed, visible_devices
from hpctrain.errors import EXIT_CONTINUE
from hpctrain.files import write_atomic
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.lifeline import die_with_supervisor
from hpctrain.runtime.stop_notes import STOP_SIGNALS
from hpctrain.telemetry.gpu_reading import GpuReading
from hpctrain.telemetry.gpus import GpuReader

#: All ranks have looked at their own node within this, or are not waited for.
_PEERS_S = 40.0
#: A GPU on which nothing runs needs some memory for the driver.
_IN_USE_BYTES = 2 * 1024**3
_SIZE = 1024


def main(environ: Mapping[str, str]) -> None:
    """Look, and write down what was seen."""
    begun = time.monotonic()
    run, attempt = RunDir(Path(environ[RUN_DIR_VARIABLE])), int(environ[ATTEMPT_VARIABLE])
    ranks = detect({**environ, ENVIRONMENT_VARIABLE: "slurm"})
    path = run.check(attempt, ranks.rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    host = environ.get("SLURMD_NODENAME")
    _listen_for_stop(path, {"rank": ranks.rank, "host": host, "trouble": [], "stopped": True})
    with GpuReader(visible_devices(environ)) as reader:
        readings = reader.read()
    mine = own_gpus(ranks, environ, len(readings))
    job = f"{environ.get('SLURM_JOB_ID')}/{environ.get('SLURM_RESTART_COUNT', 0)}"
    before = errors_before(run, host or "", ranks.local_rank, job, readings)
    shared = sharing_allowed(environ) is not None
    trouble = [
        words for index in mine for words in of_gpu(index, readings[index], before[index], shared=shared)
    ]
    if trouble:
        _tell(environ, "bad")
    for look in (_product, _sum_over_ranks):
        if not trouble:
            try:
                trouble += look(environ, ranks, mine)
            except Exception as error:  # noqa: BLE001 (whatever it is, the node cannot do this)
                trouble.append(f"{look.__name__.strip('_').replace('_', ' ')}: {error}")
            if trouble:
                _tell(environ, "bad")
    seconds = time.monotonic() - begun
    record = {"rank": ranks.rank, "host": host, "trouble": trouble, "seconds": seconds}
    write_atomic(path, json.dumps(record) + "\n")


def _listen_for_stop(path: Path, record: Mapping[str, object]) -> None:
    """Leave at a signal that is for the ranks, which are not there yet, and note that it came."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        with suppress(OSError):
            write_atomic(path, json.dumps(record) + "\n", durable=False)
        os._exit(EXIT_CONTINUE)

    for number in STOP_SIGNALS:
        signal.signal(number, leave)


def own_gpus(ranks: Ranks, environ: Mapping[str, str], num_visible: int) -> list[int]:
    """The GPUs that this process tries out: the one that its rank will take, or all where it is alone.

    The others on the node use theirs at the same time.

    Raises:
        EnvironmentMismatch: the node has more ranks than GPUs, and sharing them is not allowed.
    """
    if ranks.local_world_size == 1:
        # Of the parts of a GPU, CUDA shows a process the first alone.
        return list(range(min(num_visible, 1) if is_mig(environ) else num_visible))
    index = plan_device(ranks, environ, num_visible).index
    return [] if index is None else [index]


def errors_before(
    run: RunDir, host: str, local_rank: int, job: str, readings: Sequence[GpuReading]
) -> list[int]:
    """Memory errors of each GPU when this job looked first, which this notes where it is the first time.

    The driver counts since it was loaded: a GPU that goes on after an error of last week's is fine.

    Args:
        run: the run.
        host: this node.
        local_rank: the process on it.
        job: the start of the job; another one may have other GPUs.
        readings: what the driver says now.
    """
    now = [reading.ecc_errors or 0 for reading in readings]
    path = run.memory_errors(host, local_rank)
    with suppress(OSError, ValueError, KeyError, TypeError):
        noted = json.loads(path.read_text(encoding="utf-8"))
        if noted["job"] == job and len(noted["errors"]) == len(now):
            return [int(count) for count in noted["errors"]]
    with suppress(OSError):
        write_atomic(path, json.dumps({"job": job, "errors": now}) + "\n", durable=False)
    return now


def of_gpu(index: int, gpu: GpuReading, errors_before: int, *, shared: bool = False) -> list[str]:
    """What the driver says against a GPU. Where ranks share it, a peer may use it already."""
    trouble = []
    if (errors := (gpu.ecc_errors or 0) - errors_before) > 0:
        trouble.append(f"GPU {index} has had {errors} memory errors that were not corrected since the start")
    if not shared and (gpu.processes or (gpu.memory or 0) > _IN_USE_BYTES):
        trouble.append(f"GPU {index} is in use: {gpu.processes} processes, {gpu.memory} bytes")
    return trouble


def _product(environ: Mapping[str, str], ranks: Ranks, mine: list[int]) -> list[str]:  # noqa: ARG001
    """A product of two matrices whose result is known, on each device."""
    import torch

    on_gpu = bool(mine) and torch.cuda.is_available()
    _tell(environ, f"fine, {'cuda' if on_gpu else 'cpu'}")
    trouble = []
    for device in [f"cuda:{index}" for index in mine] if on_gpu else ["cpu"]:
        matrix = torch.full((_SIZE, _SIZE), 2.0, device=device)
        if wrong := int((matrix @ matrix != 4.0 * _SIZE).sum()):
            trouble.append(f"a matrix product on {device} has {wrong} wrong numbers")
    return trouble


def _sum_over_ranks(environ: Mapping[str, str], ranks: Ranks, mine: list[int]) -> list[str]:
    """A sum over all ranks, where all have found their own nodes to be fine."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    size, rank = ranks.world_size, ranks.rank
    if size == 1:
        return []
    store = _store(environ)
    store.wait([f"node-check/{peer}" for peer in range(size)], timedelta(seconds=_PEERS_S))
    said = [store.get(f"node-check/{peer}").decode() for peer in range(size)]
    if "bad" in said:
        return []
    if len(set(said)) > 1:
        return ["no GPU is there, but others have one"] if said[rank].endswith("cpu") else []
    device = torch.device("cuda", mine[0]) if said[rank].endswith("cuda") else torch.device("cpu")
    # NCCL refuses two ranks on one GPU.
    with_nccl = device.type == "cuda" and sharing_allowed(environ) is None
    if with_nccl:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if with_nccl else "gloo",
        store=PrefixStore("node-check-group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_PEERS_S),
    )
    value = torch.ones(1, device=device if with_nccl else "cpu")
    dist.all_reduce(value)
    total = value.item()
    dist.destroy_process_group()
    return [] if total == size else [f"a sum over {size} ranks came to {total:g}"]


def _tell(environ: Mapping[str, str], words: str) -> None:
    """Tell the peers, which wait for all."""
    with suppress(Exception):
        _store(environ).set(f"node-check/{environ['SLURM_PROCID']}", words)


def _store(environ: Mapping[str, str]) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    where = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    return TCPStore(*where, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_PEERS_S))


if __name__ == "__main__":
    die_with_supervisor(os.environ)
    main(os.environ)
