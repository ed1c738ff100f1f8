"""A process beside a rank, which goes when that goes: another interpreter takes no time of this one."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import hpctrain

#: In a container the package lies where the interpreter does not look by itself. It comes last in the path,
#: so that what lies beside it shadows nothing.
#: It gives way to the ranks where there is not a core for each.
_BOOT = (
    "import os, runpy, sys; os.nice(19); sys.path.append(sys.argv.pop()); "
    "runpy.run_module(sys.argv[1], run_name='__main__', alter_sys=True)"
)


class Companion:
    """The process. Its standard input closes when it is to end, at the latest with this process."""

    def __init__(self, module: str, *args: str) -> None:
        """Start it.

        Args:
            module: what it runs.
            args: the words that it finds in `sys.argv[2:]`.

        Raises:
            OSError: no process can be started.
        """
        package = Path(hpctrain.__file__).resolve().parents[1]
        command = [sys.executable, "-P", "-c", _BOOT, module, *args, str(package)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def tell(self, data: bytes) -> None:
        """Write to its standard input; where it has ended, nobody hears."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def end(self, limit_s: float, last_words: str = "") -> bool:
        """Have it end, and kill it after `limit_s`. Tells whether it ended by itself.

        Its standard input gets a line and closes; it ends at the line, for a child of ours may hold the pipe.
        """
        assert self._process.stdin is not None
        self.tell(f"{last_words}\n".encode())
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True
