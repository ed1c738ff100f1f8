"""The process in which loggers work: beside rank 0, so that a slow tracker holds up no training.

It is told what to do on its standard input, which stays open as long as the training goes on; a line says
how that ended.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

from hpctrain.rundir import RunDir
from hpctrain.telemetry.loggers.feed import Feed
from hpctrain.telemetry.loggers.memory import Memory
from hpctrain.telemetry.loggers.protocol import Ending, LoggedRun

#: Seconds that the last lines may take, where the training has not ended by itself; else it is waited for.
_LIMIT_S = 30.0
_HEAD = 8


@dataclass(frozen=True)
class Order:
    """What the process is to do."""

    folder: str
    config: dict[str, Any]
    sys_path: list[str]
    """Where the training finds modules: a logger may be of one of them."""
    loggers: bytes
    """Pickled, by themselves: to read them takes those modules."""

    def to_bytes(self) -> bytes:
        """What `read` reads."""
        data = pickle.dumps((self.folder, self.config, self.sys_path, self.loggers))
        return len(data).to_bytes(_HEAD, "big") + data

    @classmethod
    def read(cls, fd: int) -> Order:
        """Read it from a file descriptor.

        Raises:
            EOFError: the training ended before it was written.
        """
        return cls(*pickle.loads(_exactly(fd, int.from_bytes(_exactly(fd, _HEAD), "big"))))


def main() -> int:
    """Bring metrics to loggers until the training ends."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        order = Order.read(0)
    except EOFError:
        return 0
    sys.path += [path for path in order.sys_path if path not in sys.path]
    run = RunDir(Path(order.folder))
    logged = LoggedRun(run.run_id, run.path, config=order.config)
    ended, endings = threading.Event(), list[Ending]()
    feeds = [
        Feed(logger, logged, run.metrics, Memory.load(run.logger_memory(logger.name)), _say)
        for logger in pickle.loads(order.loggers)
    ]
    threads = [
        threading.Thread(target=feed.run, args=(ended, lambda: endings[0]), daemon=True) for feed in feeds
    ]
    for thread in threads:
        thread.start()
    endings.append(_read_ending(0))
    ended.set()
    deadline = time.monotonic() + _LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    sys.stdout.flush()
    sys.stderr.flush()
    # What a tracker's client left behind must not keep the process.
    os._exit(0)


def _read_ending(fd: int) -> Ending:
    """Wait for the end of the training; one that is killed says nothing."""
    told = b""
    while b"\n" not in told and (part := os.read(fd, 64)):
        told += part
    word = told.decode("ascii", "replace").strip()
    return cast(Ending, word) if word in get_args(Ending) else "failed"


def _exactly(fd: int, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (part := os.read(fd, count - len(data))):
            raise EOFError
        data += part
    return data


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
