"""Tracebacks for users, with the frames of hpctrain and torch folded."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path

from hpctrain.text import pluralize

_HPCTRAIN_FOLDER = f"{Path(__file__).parent}/"
_LIBRARY_FILES = re.compile(r"<frozen |.*/(?:site|dist)-packages/(?:hpctrain|torch)/")
_FRAME = re.compile(r' +File "(?P<path>[^"]*)", line \d+')

#: torch errors on a rank with a lost peer: consequences of a failure, not causes.
PEER_LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|remote process exited"
    r"|communicator was aborted|could not connect to its|recvbytes"
    r"|socket timeout|wait timeout",
    re.IGNORECASE,
)


def is_peer_lost(message: str, classes: Collection[str]) -> bool:
    """Return true if an exception of a rank only reports that another rank is gone.

    Exceptions of the operating system concern other connections, such as to a server or a data worker.
    """
    return "OSError" not in classes and PEER_LOST.search(message) is not None


def fold(traceback: str) -> str:
    """Replace each series of frames of hpctrain and torch with one line.

    A traceback without other frames is returned unchanged.
    """
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
