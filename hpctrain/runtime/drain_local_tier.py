"""Copy a run's newest state from the nodes to the run folder, and remove its files from the nodes.

`python -P -m hpctrain.runtime.drain_local_tier TIER COPIES SECONDS` runs in the place of each rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from hpctrain.rundir import RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.release_devices import shut_down_process_group


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Return the exit code: 1 if a checkpoint could not be copied."""
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    from hpctrain.checkpoint.io.retention import KEEP_ALL
    from hpctrain.checkpoint.store import CheckpointStore

    run, limit_s = RunDir(Path(environ[RUN_DIR_VARIABLE])), float(argv[2])
    tier, copies = (None if folder == "-" else Path(folder) for folder in argv[:2])
    limit = timedelta(seconds=limit_s)
    address = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    rank, size = int(environ["SLURM_PROCID"]), int(environ["SLURM_STEP_NUM_TASKS"])
    store = TCPStore(*address, is_master=False, wait_for_workers=False, timeout=limit)
    dist.init_process_group(
        "gloo", store=PrefixStore("home", store), rank=rank, world_size=size, timeout=limit
    )
    group = dist.group.WORLD if size > 1 else None
    # The run's own rules are not known here; its next attempt applies them.
    checkpoints = CheckpointStore(run.checkpoints, group, retention=KEEP_ALL, second_tier=tier)
    notes = checkpoints.drain(limit_s)
    if copies is not None and (problem := checkpoints.commit_newest_copy(copies)):
        notes.append(problem)
    if rank == 0:
        for note in notes:
            print(f"hpctrain: {note}", flush=True)
    shut_down_process_group()
    return 1 if notes else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], os.environ))
