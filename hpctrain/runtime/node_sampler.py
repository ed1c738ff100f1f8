"""Start and end of the process that measures a node, by the first rank of the node."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hpctrain.cluster import Ranks
from hpctrain.rundir import TELEMETRY_VARIABLE, RunDir
from hpctrain.runtime.sidecar import Sidecar

#: Time limit for the last line, which takes milliseconds unless the file system hangs.
_LAST_LINE_S = 1.0


class NodeSampler:
    """The process that measures this node, if any."""

    def __init__(self, run: RunDir, ranks: Ranks, environ: Mapping[str, str]) -> None:
        """Start the measurement on the first rank of the node, unless telemetry is disabled."""
        self._process: Sidecar | None = None
        if ranks.local_rank != 0 or environ.get(TELEMETRY_VARIABLE) == "0":
            return
        try:
            self._process = Sidecar(
                "hpctrain.telemetry.sampling.sampler", str(run.path), str(ranks.node_rank)
            )
        except OSError as error:
            # Training does not depend on telemetry.
            print(f"hpctrain: cannot measure the resource usage of this node: {error}", file=sys.stderr)

    def stop(self) -> None:
        """Wait until the process has written its last line, and end it."""
        if self._process is not None:
            self._process.stop(_LAST_LINE_S)
