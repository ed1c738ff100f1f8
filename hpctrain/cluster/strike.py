"""Signals for processes of a run on this host: `python -P -m hpctrain.cluster.strike RUN_DIR SIGNAL WHOM…`.

WHOM is `supervisor`, or the number of the attempt and those of the ranks. Exits with 1 where none is here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection

from hpctrain.cluster.own_processes import Held, own_processes
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE

_WORKER, _SUPERVISOR = "hpctrain.runtime.worker", "hpctrain.supervisor"


def strike_ranks(run_dir: str, number: signal.Signals, attempt: int, ranks: Collection[int]) -> list[int]:
    """Send a signal to those of the ranks that are here, and return which these were.

    Args:
        run_dir: the folder of the run.
        number: the signal.
        attempt: the start of the ranks; a rank of another one is left alone.
        ranks: which.
    """
    struck = set()
    for process in own_processes():
        rank = _rank(process, run_dir, attempt)
        if rank is not None and rank in ranks and process.signal(number):
            struck.add(rank)
    return sorted(struck)


def strike_supervisor(run_dir: str, number: signal.Signals) -> bool:
    """Send a signal to the run's supervisor under Slurm, and tell whether it is here."""
    struck = False
    for process in own_processes():
        if _is_supervisor(process.argv, run_dir):
            # What the batch script has become only waits for it.
            guardian = next((one for one in own_processes() if one.pid == process.parent), None)
            if guardian is not None and _is_supervisor(guardian.argv, run_dir):
                struck |= process.signal(number)
    return struck


def _rank(process: Held, run_dir: str, attempt: int) -> int | None:
    """Which rank of the attempt the process is; None where it is none."""
    argv, environ = process.argv, process.environ
    # Srun has the same words in its command line, and a worker that waits those of the next attempt.
    if _WORKER not in argv or os.path.basename(argv[0]) == "srun" or "SLURM_STEP_ID" not in environ:
        return None
    if environ.get(ATTEMPT_VARIABLE) != str(attempt) or not _is_same(environ.get(RUN_DIR_VARIABLE), run_dir):
        return None
    # An agent of torchrun is one task, and says to each of its ranks which that is.
    number = environ.get("RANK" if "TORCHELASTIC_RUN_ID" in environ else "SLURM_PROCID", "")
    return int(number) if number.isdigit() else None


def _is_supervisor(argv: tuple[str, ...], run_dir: str) -> bool:
    return _SUPERVISOR in argv and _is_same(argv[-1], run_dir)


def _is_same(path: str | None, run_dir: str) -> bool:
    return path is not None and os.path.realpath(path) == os.path.realpath(run_dir)


def main(argv: list[str]) -> int:
    """See the module."""
    run_dir, number, *whom = argv
    if whom == ["supervisor"]:
        return int(not strike_supervisor(run_dir, signal.Signals[number]))
    attempt, *ranks = map(int, whom)
    return int(not strike_ranks(run_dir, signal.Signals[number], attempt, ranks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
