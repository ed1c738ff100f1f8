"""What a process left that ended without telling why: a log with words in it, or a traceback elsewhere.

A rank that dies before it has opened its log prints to where its launcher prints.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

#: More than this is not searched for a traceback.
_SEARCHED_BYTES = 64 * 1024

# Of several processes that print at once the lines are mixed, but each has a whole line.
_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n"
    r"(?:(?:[ \t].*|Traceback .*)?\n)+"
    r"(?P<last>[A-Za-z_][\w.]*(?::.*)?)$",
    re.MULTILINE,
)
# What Slurm says of it comes in between.
_OF_SLURM = re.compile(r"^(?:srun|slurmstepd)(?:-[^:\s]+)?: .*\n", re.MULTILINE)


@dataclass(frozen=True)
class LastWords:
    """The most that can be known of a process's end."""

    log: Path
    """The file that has its words, as far as there are any."""
    message: str = ""
    """The last line of its traceback, or what the signal may mean."""
    traceback: str = ""


def last_words(log: Path, outer_log: Path, since: int = 0, number: signal.Signals | None = None) -> LastWords:
    """Find out what a process left.

    Args:
        log: its own.
        outer_log: of whoever started it, who may print there as well.
        since: the length of `outer_log`, in bytes, when the process was started.
        number: the signal that ended it.
    """
    message = ""
    if number == signal.SIGKILL:
        message = "somebody killed it (kill -9), or the kernel did, as it does when memory runs out"
    if size_of(log) > 0:
        return LastWords(log, message)
    if number is None and not log.exists() and (found := _newest_traceback(outer_log, since)):
        return LastWords(outer_log, found["last"], f"{found[0]}\n")
    return LastWords(outer_log if size_of(outer_log) > since or not log.exists() else log, message)


def size_of(path: Path) -> int:
    """Length of a file in bytes; 0 where there is none."""
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _newest_traceback(path: Path, since: int) -> re.Match[str] | None:
    try:
        with open(path, "rb") as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - _SEARCHED_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return None
    return max(_TRACEBACK.finditer(_OF_SLURM.sub("", text)), key=re.Match.start, default=None)
