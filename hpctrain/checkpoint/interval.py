"""How often to save: what a save costs, against what an interruption costs. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

#: Mean time between interruptions of one node, before the run has a history: one a day.
NODE_MTBF_S = 86_400.0
#: Saving more often than this helps nobody.
SHORTEST_S = 10.0


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds of training between two saves that lose the least to saving and to work done again.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006, equation 37. Its leading term is √(2 · save · mtbf), the estimate
    of J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.

    Args:
        save_s: time for which a save holds up the training.
        mtbf_s: mean time between two interruptions of the whole run.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(save_s / (2 * mtbf_s))
    return math.sqrt(2 * save_s * mtbf_s) * (1 + ratio / 3 + ratio**2 / 9) - save_s


def checkpoint_interval_s(stall_s: float, write_s: float, mtbf_s: float) -> float:
    """Seconds from the beginning of one save to that of the next.

    Args:
        stall_s: time for which a save holds up the training.
        write_s: time until it is committed, all in all; the next one cannot begin before.
        mtbf_s: mean time between two interruptions of the whole run.
    """
    return max(SHORTEST_S, write_s, stall_s + best_interval_s(stall_s, mtbf_s))


@dataclass(frozen=True)
class Interruptions:
    """What a run has been through: how often it lost work, in how much time of how many nodes."""

    count: int = 0
    node_seconds: float = 0.0

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]]) -> Interruptions:
        """Count over a run's events, oldest first.

        An attempt was interrupted if another followed it and it neither saved when it was told to stop nor
        came to its end: it crashed, was killed, or lost its node. What it was told to do costs no work.
        """
        count, node_seconds = 0, 0.0
        nodes, last, orderly = 0, 0.0, True
        for event in events:
            time = float(event.get("time", last))
            match event.get("kind"):
                case "started":
                    count += not orderly
                    nodes, last, orderly = int(event.get("nodes", 1)), time, False
                case "signal":
                    orderly = bool(event.get("saved"))
                case "finished":
                    orderly = event.get("state") != "FAILED"
            # A clock may be set back.
            node_seconds += nodes * max(0.0, time - last)
            last = time
        return cls(count, node_seconds)

    def node_mtbf_s(self, prior_s: float) -> float:
        """Mean time between interruptions of one node, after what happened.

        Interruptions are taken for a Poisson process. Its rate has a gamma prior that is worth one
        interruption in `prior_s`; with k of them seen in T node-seconds, the posterior mean of the rate is
        (1 + k) / (prior + T) (A. Gelman et al., "Bayesian Data Analysis", section 2.6), and this is its
        inverse: the prior where nothing was seen yet, T / k where much was.
        """
        return (prior_s + self.node_seconds) / (1 + self.count)
