"""Protection of the workers of any torch DataLoader from stop signals.

Slurm signals every process of a step. A rank that has to stop still needs its workers for the rest of the
step, and torch raises an exception in the rank if a worker dies.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS

#: Modules that start workers, by way of multiprocessing.
_LOADER_MODULES = ("torch.utils.data.", "torchdata.")


def is_forked_by_loader() -> bool:
    """Return true if a DataLoader forks this process now. Call this in a callback of the fork."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        module = str(frame.f_globals.get("__name__"))
        if not module.startswith("multiprocessing."):
            return module.startswith(_LOADER_MODULES)
    return False


def exit_on_signal_of_rank() -> None:
    """Exit on stop signals that the rank sends, as multiprocessing does at its exit, and on no others.

    The signals must be blocked. A thread receives them.
    """
    threading.Thread(target=_exit_on_signal_of, args=(os.getppid(),), daemon=True).start()


def _exit_on_signal_of(parent: int) -> None:
    while signal.sigwaitinfo(STOP_SIGNALS).si_pid != parent:
        pass
    os._exit(0)
