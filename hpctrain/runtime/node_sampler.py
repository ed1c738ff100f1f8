"""Starting the process that measures a node: the node's first rank does, and takes it along when it goes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import hpctrain
from hpctrain.cluster import Ranks
from hpctrain.rundir import TELEMETRY_VARIABLE, RunDir

#: In a container the package lies where the interpreter does not look by itself. It comes last in the path,
#: so that what lies beside it shadows nothing.
_BOOT = (
    "import runpy, sys; sys.path.append(sys.argv.pop()); "
    "runpy.run_module('hpctrain.telemetry.sampler', run_name='__main__', alter_sys=True)"
)
#: It has a line to write, which takes milliseconds; a file system that hangs is not waited for.
_LAST_LINE_S = 1.0


class NodeSampler:
    """The process. It ends when its standard input closes, at the latest with the end of this one."""

    def __init__(self, run: RunDir, node: int) -> None:
        command = [sys.executable, "-P", "-c", _BOOT, str(run.path), str(node)]
        package = Path(hpctrain.__file__).resolve().parents[1]
        self._process = subprocess.Popen([*command, str(package)], stdin=subprocess.PIPE)

    def end(self) -> None:
        """Have it write its last line, which is waited for a moment."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_LINE_S)


def measure_node(run: RunDir, ranks: Ranks, environ: Mapping[str, str]) -> NodeSampler | None:
    """Start to measure the node, where this is its first rank and nobody has switched that off.

    Returns None where this is for another rank to do, or where no process can be started: a training does
    not depend on being measured.
    """
    if ranks.local_rank != 0 or environ.get(TELEMETRY_VARIABLE) == "0":
        return None
    try:
        return NodeSampler(run, ranks.node_rank)
    except OSError as error:
        print(f"hpctrain: the node is not measured: {error}", file=sys.stderr)
        return None
