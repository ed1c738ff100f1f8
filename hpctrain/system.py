"""Provide time, threads, processes and the host to the supervisor, which takes them only from here.

Callers write `system.sleep(1.0)`, so a test can replace all of them: `tests/simulation` runs the supervisor
in virtual time. `scripts/check_conventions.py` rejects direct uses.
"""

from __future__ import annotations

from importlib import import_module
from os import _exit as exit_now
from os import getpid
from queue import SimpleQueue
from signal import signal as handle_signal
from threading import Event, Lock, RLock, Thread, Timer
from time import monotonic, sleep, time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor
    from socket import create_connection, gethostname
    from subprocess import Popen

__all__ = [
    "Event", "Lock", "Popen", "RLock", "SimpleQueue", "Thread", "ThreadPoolExecutor", "Timer",
    "create_connection", "exit_now", "gethostname", "getpid", "handle_signal", "monotonic", "sleep", "time",
]  # fmt: skip

#: Imported on first use, because the import takes milliseconds.
_LAZY = {
    "Popen": "subprocess",
    "ThreadPoolExecutor": "concurrent.futures",
    "create_connection": "socket",
    "gethostname": "socket",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(import_module(_LAZY[name]), name))
