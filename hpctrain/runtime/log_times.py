"""When a rank's log had which length, so that the logs of all ranks can be read in the order of time.

What a rank prints goes straight to its log and is never at risk; a thread looks once a second how long that
has become. The ranks of a node share a file of these notes, which is kept open: on a shared file system,
opening and closing cost more than a line.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

_INTERVAL_S = 1.0


def note_log_times(path: Path, rank: int, interval_s: float = _INTERVAL_S) -> None:
    """Start noting in the file at `path` how long this rank's standard output, which is its log, has become.

    Never raises: logs are read without the notes, too.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return
    log = os.dup(1)
    threading.Thread(
        target=_note, args=(fd, log, rank, interval_s), name="hpctrain-log-times", daemon=True
    ).start()


def _note(fd: int, log: int, rank: int, interval_s: float) -> None:
    noted = 0
    while True:
        time.sleep(interval_s)
        if (size := os.fstat(log).st_size) == noted:
            continue
        record = {"time": round(time.time(), 2), "rank": rank, "bytes": size}
        try:
            # In one write, so that the ranks of a node do not mix.
            os.write(fd, (json.dumps(record) + "\n").encode("ascii"))
        except OSError:
            return
        noted = size
