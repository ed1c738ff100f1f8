"""Shift the clocks of each Python process that has this folder on its path.

The file named by TEST_CLOCK holds the seconds by which the wall clock is off; it may change at any time. The
monotonic clock of each process is off by its own number, as if each ran on its own host.
"""

import os
import time

if path := os.environ.get("TEST_CLOCK"):
    _wall, _monotonic, _shift_s = time.time, time.monotonic, 1e5 * (1 + os.getpid() % 97)

    def _shifted() -> float:
        try:
            with open(path) as file:
                return _wall() + float(file.read() or 0)
        except OSError:
            return _wall()

    time.time = _shifted
    time.monotonic = lambda: _monotonic() + _shift_s
