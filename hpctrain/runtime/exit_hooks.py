"""Call functions when this process exits by itself, also by `os._exit`."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import NoReturn


def call_at_exit(function: Callable[[], object]) -> None:
    """Call a function at the end of this process, but not of its forked children."""
    atexit.register(function)
    pid, exit_process = os.getpid(), os._exit

    def call_and_exit(status: int) -> NoReturn:
        if os.getpid() == pid:
            function()
        exit_process(status)

    os._exit = call_and_exit
