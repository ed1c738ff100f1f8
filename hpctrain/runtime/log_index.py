"""Records of the length of a rank's log over time, for merging the logs of all ranks.

A rank prints directly to its log; a thread only checks the length of the log once a second. The ranks of a
node share a record file that remains open: on a shared file system, opening and closing are slower than
writing a line.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from hpctrain.files import own_file

_INTERVAL_S = 1.0


def start_log_index(path: Path, rank: int) -> None:
    """Start to record the length of this rank's log, its standard output, in the file at `path`.

    Never raises an exception: logs can be read without these records.
    """
    try:
        fd = own_file(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
    except OSError:
        return
    log = os.dup(1)
    threading.Thread(
        target=_record_lengths, args=(fd, log, rank), name="hpctrain-log-times", daemon=True
    ).start()


def _record_lengths(fd: int, log: int, rank: int) -> None:
    noted = 0
    while True:
        time.sleep(_INTERVAL_S)
        if (size := os.fstat(log).st_size) == noted:
            continue
        record = {"time": round(time.time(), 2), "rank": rank, "bytes": size}
        try:
            # A single write, so that the ranks of a node do not mix lines.
            os.write(fd, (json.dumps(record) + "\n").encode("ascii"))
        except OSError:
            return
        noted = size
