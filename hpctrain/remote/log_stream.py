"""Show the logs of a run on a cluster, and continue after a lost connection."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from hpctrain.jobs.runs.run_log_reader import LogMark, LogPosition
from hpctrain.remote.cluster import Cluster
from hpctrain.remote.protocol import RECORD_START
from hpctrain.remote.ssh_connection import SSH_FAILED


class LogStream:
    """Output of a command that follows a run.

    The cluster sends each piece of text as one record, with its position in the logs. A piece is shown only
    when its record is complete, and a new connection continues after the last record: no line is lost or
    repeated.
    """

    def __init__(self, cluster: Cluster, show: Callable[[str, bool], None]) -> None:
        """Prepare the stream. `show` receives each text and a flag that is true for stderr."""
        self._cluster, self._show = cluster, show
        self._follow: dict[str, Any] = {}
        self._positions: dict[str, LogPosition] = {}
        self._last_notice = ""

    @property
    def detached(self) -> str | None:
        """The message for a user who interrupts the stream; None before the stream has started."""
        return self._follow.get("detached")

    def run(self, args: Sequence[str]) -> int:
        """Run `hpctrain ARGS` on the cluster, and return its exit code."""
        while (code := self._run_once(args)) == SSH_FAILED and (self._follow or args[0] == "logs"):
            self._cluster.connection.reopen(lambda message: self._show(f"{message}\n", True))
            args = self._follow.get("args", args)
        return code

    def _run_once(self, args: Sequence[str]) -> int:
        positions = {source: asdict(position) for source, position in self._positions.items()}
        start = json.dumps({**self._follow, "positions": positions})
        command = self._cluster.connection.command(self._cluster.hpctrain(args, stream=True))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            try:
                with suppress(BrokenPipeError):
                    process.stdin.write(f"{start}\n".encode())  # type: ignore[union-attr]
                    process.stdin.flush()  # type: ignore[union-attr]
                for data in process.stdout or ():
                    line = data.decode(errors="replace")
                    if not line.startswith(RECORD_START):
                        self._show(line, False)
                    elif line.endswith("\n"):
                        self._receive(*json.loads(line[len(RECORD_START) :]))
            except BaseException:
                process.kill()
                raise
        return process.returncode

    def _receive(self, kind: str, content: Any, mark: list[Any] | None) -> None:
        if kind == "follow":
            self._follow = content
            return
        if mark is not None:
            self._positions.setdefault(mark[0], LogPosition()).advance(LogMark(*mark))
        elif content == self._last_notice:
            return  # A new connection reports the state of the job again.
        else:
            self._last_notice = content
        self._show(content, kind == "err")
