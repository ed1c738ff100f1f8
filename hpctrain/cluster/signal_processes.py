"""Send a signal to processes of a run: `signal_processes RUN_DIR SIGNAL supervisor|ATTEMPT RANK`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection

from hpctrain.cluster.processes import ProcessInfo, processes
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE
from hpctrain.text import is_count

_WORKER, _SUPERVISOR = "hpctrain.runtime.worker", "hpctrain.supervisor"


def signal_ranks(run_dir: str, number: signal.Signals, attempt: int, ranks: Collection[int]) -> list[int]:
    """Send a signal to the `ranks` on this host, and return these ranks."""
    struck = set()
    for process in processes(os.geteuid()):
        rank = _rank_of(process, run_dir, attempt)
        if rank is not None and rank in ranks and process.signal(number):
            struck.add(rank)
    return sorted(struck)


def signal_supervisor(run_dir: str, number: signal.Signals) -> bool:
    """Send a signal to the run's supervisor under Slurm; return true if it is on this host."""
    struck = False
    own_processes = processes(os.geteuid())
    for process in own_processes:
        if _is_supervisor(process.argv, run_dir):
            # The parent process, which replaced the batch script, has the same arguments but only waits.
            guardian = next((parent for parent in own_processes if parent.pid == process.parent), None)
            if guardian is not None and _is_supervisor(guardian.argv, run_dir):
                struck |= process.signal(number)
    return struck


def find_rank(run_dir: str, attempt: int, rank: int) -> ProcessInfo | None:
    matching = [process for process in processes(os.geteuid()) if _rank_of(process, run_dir, attempt) == rank]
    # Data workers are forks of their rank.
    pids = {process.pid for process in matching}
    return next((process for process in matching if process.parent not in pids), None)


def _rank_of(process: ProcessInfo, run_dir: str, attempt: int) -> int | None:
    """Return the rank of the process in the attempt; None for other processes."""
    argv, environ = process.argv, process.environ
    # The command lines of srun and apptainer have the same words; a standby worker has those of the next
    # attempt. In a container, the module is part of another word.
    is_python = os.path.basename(argv[0]).startswith("python")
    if not (is_python and any(_WORKER in argument for argument in argv)) or "SLURM_STEP_ID" not in environ:
        return None
    if environ.get(ATTEMPT_VARIABLE) != str(attempt) or not _is_same(environ.get(RUN_DIR_VARIABLE), run_dir):
        return None
    # A torchrun agent is one Slurm task, and passes RANK to each of its ranks.
    number = environ.get("RANK" if "TORCHELASTIC_RUN_ID" in environ else "SLURM_PROCID", "")
    return int(number) if is_count(number) else None


def _is_supervisor(argv: tuple[str, ...], run_dir: str) -> bool:
    return _SUPERVISOR in argv and _is_same(argv[-1], run_dir)


def _is_same(path: str | None, run_dir: str) -> bool:
    return path is not None and os.path.realpath(path) == os.path.realpath(run_dir)


def main(argv: list[str]) -> int:
    run_dir, number, *whom = argv
    if whom == ["supervisor"]:
        return int(not signal_supervisor(run_dir, signal.Signals[number]))
    attempt, *ranks = map(int, whom)
    return int(not signal_ranks(run_dir, signal.Signals[number], attempt, ranks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
