"""Time limits that a busy machine does not exceed."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def slowness() -> float:
    """Return the factor by which this machine is slower than an idle one: the load per CPU, at least 1."""
    return max(1.0, max(os.getloadavg()[:2]) / (os.cpu_count() or 1))


def scaled(seconds: float) -> float:
    """Return a time limit for this machine from one for an idle machine. The load may still rise."""
    return 2 * seconds * slowness()


def deadline_in(seconds: float) -> float:
    """Return the end of a scaled time limit on the monotonic clock."""
    return time.monotonic() + scaled(seconds)


def wait_for(predicate: Callable[[], T], timeout: float, what: str, interval: float = 0.05) -> T:
    """Return the first true value of `predicate()`; fail with `what` after `timeout` on an idle machine."""
    start, deadline = time.monotonic(), deadline_in(timeout)
    while not (value := predicate()):
        if (now := time.monotonic()) > deadline:
            raise AssertionError(f"waited {now - start:.0f} s for {what}; got {value!r}")
        time.sleep(interval)
    return value
