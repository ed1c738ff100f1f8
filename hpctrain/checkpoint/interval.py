"""How often to save."""

from __future__ import annotations

import math

#: Mean time between interruptions of one node, before the run has a history: a failure or a preemption a day.
NODE_MTBF_S = 86_400.0
#: Saving more often than this helps nobody.
SHORTEST_S = 10.0


def checkpoint_interval_s(save_s: float, num_nodes: int, node_mtbf_s: float = NODE_MTBF_S) -> float:
    """Seconds between two saves that lose the least time to saving and to work done again.

    J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974:
    √(2 · save time · mean time between failures), where the failures of n nodes come n times as often.
    """
    return max(SHORTEST_S, math.sqrt(2 * save_s * node_mtbf_s / num_nodes))
