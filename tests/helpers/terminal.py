"""Run a command on a terminal, with input and output."""

import fcntl
import os
import pty
import select
import signal
import struct
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from helpers.commands import environment
from helpers.waiting import deadline_in, wait_for


class Terminal:
    """A terminal with a command in the foreground. Use as a context manager, which closes the terminal."""

    def __init__(self, argv: Sequence[str | Path], cwd: Path, env: Mapping[str, str]) -> None:
        self._output = self._all = b""
        self.pid, self._master = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # A shell may ignore it in background jobs.
            os.execvpe(argv[0], [str(word) for word in argv], environment({"TERM": "xterm", **env}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._master)  # The kernel sends SIGHUP.
        try:
            if self.pid:
                wait_for(lambda: os.waitpid(self.pid, os.WNOHANG)[0], 20, "the end after SIGHUP")
        except BaseException:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
            raise

    @property
    def output(self) -> str:
        return self._all.decode(errors="replace")

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def send(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str, limit_s: float = 60.0) -> str:
        """Read until `text` appears; return the output before it."""
        deadline = deadline_in(limit_s)
        while text.encode() not in self._output:
            if not self._read(deadline):
                raise AssertionError(f"no {text!r} within {limit_s} s, but: {self._output.decode()}")
        before, _, self._output = self._output.partition(text.encode())
        return before.decode(errors="replace")

    def wait(self, limit_s: float = 60.0) -> int:
        deadline = deadline_in(limit_s)
        while self._read(deadline):
            pass
        assert time.monotonic() < deadline, f"no end within {limit_s} s: {self._output.decode()}"
        pid, self.pid = self.pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _read(self, deadline: float) -> bool:
        """Read more output; return False at its end, or after the deadline."""
        if not select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            new = os.read(self._master, 65536)
        except OSError:  # the end of a terminal, on Linux
            return False
        self._output += new
        self._all += new
        return bool(new)


def run_on_terminal(argv: Sequence[str], cwd: Path, columns: int) -> str:
    env = {"COLUMNS": str(columns), "LINES": "20", "NO_COLOR": "1"}
    with Terminal(argv, cwd, env) as terminal:
        assert terminal.wait() == 0
        return terminal.output
