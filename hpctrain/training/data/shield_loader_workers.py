"""Protection of the workers of any torch DataLoader from stop signals.

Slurm signals every process of a step. A rank that has to stop still needs its workers for the rest of the
step, and torch raises an exception in the rank if a worker dies.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading

from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS
from hpctrain.runtime.stopping.stop_signals import _install_fork_hooks
from hpctrain.torch_compat import DataLoaderIterator

#: Maximum depth of the stack between a DataLoader's constructor and a fork.
_MAX_DEPTH = 20


@functools.cache
def shield_loader_workers() -> None:
    """Configure future DataLoader workers to ignore stop signals, except from their own rank."""
    # These callbacks restore the signal mask in the child, so they must run first.
    _install_fork_hooks()
    forking = threading.local()

    def before() -> None:
        forking.is_worker = _is_called_by_loader()

    def in_child() -> None:
        if forking.is_worker:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            threading.Thread(target=_exit_on_signal_of, args=(os.getppid(),), daemon=True).start()

    os.register_at_fork(before=before, after_in_child=in_child)


def _exit_on_signal_of(parent: int) -> None:
    """Exit when the rank ends this worker, as multiprocessing does at exit."""
    while (info := signal.sigwaitinfo(STOP_SIGNALS)) is None or info.si_pid != parent:
        pass
    os._exit(0)


def _is_called_by_loader() -> bool:
    frame = sys._getframe(2)
    for _ in range(_MAX_DEPTH):
        if isinstance(frame.f_locals.get("self"), DataLoaderIterator):
            return True
        if frame.f_back is None:
            break
        frame = frame.f_back
    return False
