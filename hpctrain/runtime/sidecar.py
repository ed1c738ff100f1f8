"""Start a process beside a rank, which exits with it: a separate interpreter does not slow down the rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from hpctrain.cluster import Ranks
from hpctrain.rundir import TELEMETRY_VARIABLE, RunDir

#: In a container, or for a batch script, the packages are outside of the interpreter's search path. Their
#: folders are appended last, so that they shadow nothing. The low priority reserves the cores for the ranks.
_BOOT = (
    "import os, runpy, sys; os.nice(19); sys.path.extend(sys.argv.pop().split(os.pathsep)); "
    "runpy.run_module(sys.argv[1], run_name='__main__', alter_sys=True)"
)


class Sidecar:
    """A process that exits when its standard input closes, at the latest when this process exits."""

    def __init__(self, module: str, *args: str) -> None:
        folders = [str(Path(__file__).resolve().parents[2]), str(Path(msgspec.__file__).parents[1])]
        command = [sys.executable, "-P", "-c", _BOOT, module, *args, os.pathsep.join(folders)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def write(self, data: bytes) -> None:
        """Write to the standard input of the process; the data is lost if the process has exited."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def stop(self, limit_s: float, final_input: str = "") -> bool:
        """Request the exit of the process; kill it after `limit_s` seconds, and return false."""
        assert self._process.stdin is not None
        # A child of this process may keep the pipe open.
        self.write(f"{final_input}\n".encode())
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False
        return True


def start_node_sampler(
    run: RunDir, ranks: Ranks, environ: Mapping[str, str], node: int | None = None
) -> Sidecar | None:
    """Start to measure this node, by default of index `node_rank`, on its first rank if telemetry is on."""
    if ranks.local_rank != 0 or environ.get(TELEMETRY_VARIABLE) == "0":
        return None
    node = ranks.node_rank if node is None else node
    try:
        return Sidecar("hpctrain.telemetry.sampling.sampler", str(run.path), str(node))
    except OSError as error:
        # Training does not depend on telemetry.
        print(f"hpctrain: cannot measure the resource usage of this node: {error}", file=sys.stderr)
        return None
