"""Choose the intervals of checkpoints and of copies in memory from their costs. Imports no torch."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from hpctrain.record_types import Event

#: Mean time between interruptions of a node in seconds, for a run without history: one day.
NODE_MTBF_S = 86_400.0
#: Minimum interval in seconds; shorter intervals have no benefit.
MIN_INTERVAL_S = 10.0
#: Allowance for a save that is slower than all earlier saves, in seconds and as a factor.
SAVE_MARGIN_S, _SAVE_MARGIN_FACTOR = 2.0, 1.25


def optimal_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return the training time between two saves, in seconds, that minimizes saving and repeated work.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006, equation 37. Its leading term is √(2 · save · mtbf), the estimate
    of J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974.

    Args:
        save_s: time for which a save stalls training.
        mtbf_s: mean time between two interruptions of the whole run.
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = math.sqrt(save_s / (2 * mtbf_s))
    return math.sqrt(2 * save_s * mtbf_s) * (1 + ratio / 3 + ratio**2 / 9) - save_s


def longest_save_s(measured_s: float) -> float:
    """Return the seconds to reserve for a save, based on the longest measured save."""
    return _SAVE_MARGIN_FACTOR * measured_s + SAVE_MARGIN_S


def checkpoint_interval_s(stall_s: float, write_s: float, mtbf_s: float) -> float:
    return max(MIN_INTERVAL_S, write_s, stall_s + optimal_interval_s(stall_s, mtbf_s))


@dataclass(frozen=True)
class InterruptionHistory:
    count: int = 0
    node_seconds: float = 0.0

    @classmethod
    def from_events(cls, events: Iterable[Event]) -> InterruptionHistory:
        """Count over a run's events, oldest first.

        An attempt was interrupted if another attempt followed, and it neither saved on a stop signal nor
        finished. It crashed, was killed, or lost its node. A requested stop loses no work.
        """
        count, node_seconds = 0, 0.0
        nodes, last_time, orderly = 0, 0.0, True
        for event in events:
            match event.kind:
                case "started":
                    count += not orderly
                    nodes, last_time, orderly = event.nodes or 1, event.time, False
                case "signal":
                    orderly = bool(event.saved)
                case "finished":
                    orderly = event.state != "FAILED"
            # Clocks may be set back.
            node_seconds += nodes * max(0.0, event.time - last_time)
            last_time = event.time
        return cls(count, node_seconds)

    def node_mtbf_s(self, prior_s: float) -> float:
        """Return the estimated mean time between interruptions of one node, in seconds.

        Interruptions are modelled as a Poisson process. The rate has a gamma prior equivalent to one
        interruption in `prior_s`. With k interruptions in T node-seconds, the posterior mean of the rate is
        (1 + k) / (prior + T) (A. Gelman et al., "Bayesian Data Analysis", section 2.6). The result is the
        inverse: the prior without history, and about T / k with a long history.
        """
        return (prior_s + self.node_seconds) / (1 + self.count)


#: Maximum share of the training time that copies in memory take.
_MAX_COPY_SHARE = 0.02
#: Copies whose cost is measured. The first copies also allocate memory.
_NUM_MEASURED, _NUM_WARM_UP = 5, 2


class CopyInterval:
    """Steps between two copies: fixed, or chosen by rank 0 from the measured cost of a copy."""

    def __init__(self, fixed: int | None) -> None:
        self.every = self.wanted = fixed or 1
        self._is_fixed = fixed is not None
        self._measured: deque[tuple[float, float]] = deque(maxlen=_NUM_MEASURED)
        self._num_ignored = 0

    def on_copied(self, cost_s: float, step_s: float) -> None:
        if self._is_fixed:
            return
        if self._num_ignored < _NUM_WARM_UP:
            self._num_ignored += 1
            return
        self._measured.append((cost_s, step_s))
        cost, step = (median(values) for values in zip(*self._measured, strict=True))
        self.wanted = max(1, math.ceil(cost / (_MAX_COPY_SHARE * max(step, 1e-6))))
