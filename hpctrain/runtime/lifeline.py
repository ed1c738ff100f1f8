"""Ways for a process to go when the one that it belongs to is gone, by whatever cause."""

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
    """Where a lifeline was handed down, kill this process group as soon as the other end is gone."""
    text = environ.pop(LIFELINE_VARIABLE, None)
    if text is None:
        return
    fd = int(text)
    os.set_inheritable(fd, False)

    def watch() -> None:
        os.read(fd, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="hpctrain-lifeline", daemon=True).start()


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies; on systems other than Linux nothing is done."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
