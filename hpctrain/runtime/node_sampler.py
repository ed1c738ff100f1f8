"""Starting the process that measures a node: the node's first rank does, and takes it along when it goes."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hpctrain.cluster import Ranks
from hpctrain.rundir import TELEMETRY_VARIABLE, RunDir
from hpctrain.runtime.companion import Companion

#: It has a line to write, which takes milliseconds; a file system that hangs is not waited for.
_LAST_LINE_S = 1.0


class NodeSampler:
    """The process that measures this node, or none."""

    def __init__(self, run: RunDir, ranks: Ranks, environ: Mapping[str, str]) -> None:
        """Start to measure, where this is the first rank of its node and nobody has switched that off."""
        self._process: Companion | None = None
        if ranks.local_rank != 0 or environ.get(TELEMETRY_VARIABLE) == "0":
            return
        try:
            self._process = Companion("hpctrain.telemetry.sampler", str(run.path), str(ranks.node_rank))
        except OSError as error:
            # A training does not depend on being measured.
            print(f"hpctrain: the node is not measured: {error}", file=sys.stderr)

    def end(self) -> None:
        """Have the last line written."""
        if self._process is not None:
            self._process.end(_LAST_LINE_S)
