"""Start probes with submitit: `record_ranks_with_submitit.py local|slurm FOLDER`.

Print `RANK: PID` for each task, in submitit's order.
"""

import os
import runpy
import sys
from pathlib import Path

import submitit

PROBE = str(Path(__file__).with_name("record_rank.py").resolve())


def task(folder: str) -> int:
    """Run the probe. This function is unpickled in a process that cannot import our modules."""
    runpy.run_path(PROBE)["main"]([folder])
    return os.getpid()


if __name__ == "__main__":
    kind, folder = sys.argv[1:]
    jobs = Path(folder, "submitit")
    if kind == "local":
        executor = submitit.LocalExecutor(folder=jobs)
        executor.update_parameters(tasks_per_node=3, timeout_min=2)
    else:
        executor = submitit.SlurmExecutor(folder=jobs)
        executor.update_parameters(nodes=2, ntasks_per_node=2, cpus_per_task=1, time=2)
    for rank, pid in enumerate(executor.submit(task, folder).results()):
        print(f"{rank}: {pid}")
