"""Exit of a process after its parent or supervisor has exited for any reason."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import MutableMapping

from hpctrain.rundir import LIFELINE_VARIABLE

#: prctl(2): the signal that the kernel sends when the parent dies.
_PR_SET_PDEATHSIG = 1


def die_with_supervisor(environ: MutableMapping[str, str]) -> None:
    """Kill this process group when the other end of an inherited lifeline closes."""
    text = environ.pop(LIFELINE_VARIABLE, None)
    if text is None:
        return
    fd = int(text)
    os.set_inheritable(fd, False)

    def watch() -> None:
        os.read(fd, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="hpctrain-lifeline", daemon=True).start()


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Request a signal from the kernel when the parent dies. Does nothing except on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
