"""Find the cause of a failure in the output of a process, and shorten its traceback.

A rank that fails before opening its log prints to the output of its launcher.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from hpctrain.files import file_size, open_regular
from hpctrain.text import pluralize

#: Number of bytes at the end of a log to search for a traceback.
_SEARCHED_BYTES = 64 * 1024

# Processes that print at the same time mix their lines, but each line remains complete.
_TRACEBACK = re.compile(
    r"^Traceback \(most recent call last\):\n"
    r"(?:(?:[ \t].*|Traceback .*)?\n)+"
    r"(?P<last>[A-Za-z_][\w.]*(?::.*)?)$",
    re.MULTILINE,
)
# Slurm's own messages can appear within a traceback.
_SLURM_LINES = re.compile(r"^(?:srun|slurmstepd)(?:-[^:\s]+)?: .*\n", re.MULTILINE)
#: Slurm's reports of tasks that have ended, and of steps that end because of them.
_TASK_REPORT = re.compile(
    r"(?:srun|slurmstepd)(?:-[^:\s]+)?: (?:Terminating |error: (?:\S+: tasks? [\d,-]+: |\*\*\* ))"
)

#: Output of crash handlers without a cause: native stacks, and the list of loaded modules.
_NOISE = re.compile(
    r"\s*(?:frame #\d+: |Binary file \".*\", at |Current thread's C stack trace |Extension modules: "
    r"|#\d+ +0x[0-9a-f]+|@ +0x[0-9a-f]+|\*\*\* SIG[A-Z]+ received at |PC: @ |<truncated rest of calls>)"
    r"|\s*Exception raised from .* \(most recent call first\):"
)
#: Cause of an abort, as printed by the C++ runtime.
_WHAT = re.compile(r"^\s*what\(\):\s*(.+)$", re.MULTILINE)

_HPCTRAIN_FOLDER = f"{Path(__file__).parents[1]}/"
_LIBRARY_FILES = re.compile(r"<frozen |.*/(?:site|dist)-packages/(?:hpctrain|torch)/")
_FRAME = re.compile(r' +File "(?P<path>[^"]*)", line \d+')

#: torch errors on a rank with a lost peer: consequences of a failure, not causes.
PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|remote process exited"
    r"|communicator was aborted|could not connect to its|recvbytes"
    r"|socket timeout|wait timeout",
    re.IGNORECASE,
)

#: Failure kind of a rank that exited with code 0 during training.
UNFINISHED = "unfinished"
#: Remedy for a script that exited during training.
UNFINISHED_ADVICE = "To end training early, call end() on the trainer or session, and let training finish"


@dataclass(frozen=True)
class CrashOutput:
    """Available information about the exit of a process."""

    log: Path
    """The file with the output, if any."""
    message: str = ""
    """The last line of the traceback, or the meaning of the signal."""
    traceback: str = ""


def find_crash_output(log: Path, outer_log: Path, since: int = 0, number: int | None = None) -> CrashOutput:
    message = ""
    if number == signal.SIGKILL:
        message = "sent by a user (kill -9), or by the kernel because memory ran out"
    if number == signal.SIGABRT:
        message = _abort_reason(log)
    if number is None:
        message = _last_line(log)
    if file_size(log) > 0:
        return CrashOutput(log, message)
    if number is None and not log.exists() and (match := _newest_traceback(outer_log, since)):
        return CrashOutput(outer_log, match["last"], f"{match[0]}\n")
    return CrashOutput(outer_log if file_size(outer_log) > since or not log.exists() else log, message)


def useful_lines(lines: Iterable[str]) -> list[str]:
    """Return the lines without native stacks and lists of modules."""
    return [line for line in lines if not _NOISE.match(line)]


def _abort_reason(log: Path) -> str:
    """Return the message of the C++ exception that aborted a process, from the end of its log."""
    reasons = _WHAT.findall(_end_of(log, 0))
    return reasons[-1].strip() if reasons else ""


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in _end_of(log, 0).splitlines()]
    # Reports of ended tasks follow the output of the failed program. Other messages of srun may be the cause.
    causes = [line for line in lines if not _TASK_REPORT.match(line)]
    return next(filter(None, reversed([*lines, *causes])), "")[:300]


def describe_unfinished(call: str, step: int | None, last_step: int | None) -> str:
    """Return a clause with the step of the training at which the script exited with code 0."""
    of = "" if last_step is None else f" of {last_step}"
    place = f"after step {step}{of}" if step else f"before step 1{of}"
    return f"the script exited with code 0 before {call} finished ({place})"


def _end_of(path: Path, since: int) -> str:
    try:
        with open_regular(path) as file:
            file.seek(max(since, file.seek(0, os.SEEK_END) - _SEARCHED_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _newest_traceback(path: Path, since: int) -> re.Match[str] | None:
    text = _end_of(path, since)
    return max(_TRACEBACK.finditer(_SLURM_LINES.sub("", text)), key=re.Match.start, default=None)


def is_peer_lost(message: str, classes: Collection[str]) -> bool:
    """Return true if an exception of a rank only reports that another rank is gone.

    Exceptions of the operating system concern other connections, such as to a server or a data worker.
    """
    return "OSError" not in classes and PEER_LOST.search(message) is not None


def fold(traceback: str) -> str:
    """Replace each series of frames of hpctrain and torch with one line, unless there are no others."""
    lines: list[str] = []
    folded, inside, has_own = 0, False, False
    for line in traceback.splitlines():
        if frame := _FRAME.match(line):
            inside = frame["path"].startswith(_HPCTRAIN_FOLDER) or bool(_LIBRARY_FILES.match(frame["path"]))
            has_own |= not inside
            folded += inside
        elif not line.startswith("  "):  # the code of a frame, and a note on its repetition, are indented
            inside = False
        if inside:
            continue
        if folded:
            lines.append(f"  … {pluralize(folded, 'frame')} of hpctrain and torch")
            folded = 0
        lines.append(line)
    return "\n".join(lines) + "\n" * traceback.endswith("\n") if has_own else traceback
