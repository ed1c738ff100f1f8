"""A look at this rank's node before the training starts: `python -P -m hpctrain.runtime.node_check`.

Each rank tries out what it will need: a file in the run folder, its GPU, free and without memory errors, a
small matrix product, and at last a sum over all ranks. The supervisor reads what it writes down.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from hpctrain.cluster.devices import visible_devices
from hpctrain.files import write_atomic
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
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
    rank = int(environ["SLURM_PROCID"])
    path = run.check(attempt, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    trouble = [*_of_gpus(environ)]
    for look in (_product, _sum_over_ranks):
        if not trouble:
            try:
                trouble += look(environ)
            except Exception as error:  # noqa: BLE001 (whatever it is, the node cannot do this)
                trouble.append(f"{look.__name__.strip('_').replace('_', ' ')}: {error}")
            if trouble:
                _tell(environ, "bad")
    seconds = time.monotonic() - begun
    record = {"rank": rank, "host": environ.get("SLURMD_NODENAME"), "trouble": trouble, "seconds": seconds}
    write_atomic(path, json.dumps(record) + "\n")


def _of_gpus(environ: Mapping[str, str]) -> list[str]:
    """What the driver says against this rank's GPUs."""
    trouble = []
    with GpuReader(visible_devices(environ)) as gpus:
        for index, gpu in enumerate(gpus.read()):
            if gpu.ecc_errors:
                trouble.append(f"GPU {index} has had {gpu.ecc_errors} memory errors that were not corrected")
            if gpu.processes or (gpu.memory or 0) > _IN_USE_BYTES:
                trouble.append(f"GPU {index} is in use: {gpu.processes} processes, {gpu.memory} bytes")
    if trouble:
        _tell(environ, "bad")
    return trouble


def _product(environ: Mapping[str, str]) -> list[str]:
    """A product of two matrices whose result is known, on the device."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    _tell(environ, f"fine, {device.type}")
    matrix = torch.full((_SIZE, _SIZE), 2.0, device=device)
    wrong = int((matrix @ matrix != 4.0 * _SIZE).sum())
    return [f"a matrix product on {device} has {wrong} wrong numbers"] if wrong else []


def _sum_over_ranks(environ: Mapping[str, str]) -> list[str]:
    """A sum over all ranks, where all have found their own nodes to be fine."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    size, rank = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ["SLURM_PROCID"])
    if size == 1:
        return []
    store = _store(environ)
    store.wait([f"node-check/{peer}" for peer in range(size)], timedelta(seconds=_PEERS_S))
    said = [store.get(f"node-check/{peer}").decode() for peer in range(size)]
    if "bad" in said:
        return []
    if len(set(said)) > 1:
        return ["no GPU is there, but others have one"] if said[rank].endswith("cpu") else []
    with_gpus = said[rank].endswith("cuda")
    dist.init_process_group(
        "nccl" if with_gpus and environ.get("CUDA_VISIBLE_DEVICES") else "gloo",
        store=PrefixStore("node-check-group", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_PEERS_S),
    )
    value = torch.ones(1, device="cuda" if with_gpus else "cpu")
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
    main(os.environ)
