"""Detect losses that are not finite, or far above the previous losses, and record excluded steps."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from hpctrain.errors import BadLoss
from hpctrain.record_types import Event
from hpctrain.runtime.failure_file import mark_non_retryable
from hpctrain.training.base.metric_accumulator import SKIPPED_FIELD
from hpctrain.training.trainer_config import TrainerConfig

#: Maximum and minimum number of losses for a comparison.
_WINDOW, _MIN_LOSSES = 128, 32
#: Robust standard deviations of "auto".
_SPIKE_THRESHOLD = 20.0
#: Lower limit of the standard deviation, as a fraction of the median, for nearly constant losses.
_MIN_DEVIATION = 0.01
#: Maximum number of consecutive steps with a bad loss, or skipped because of float16.
MAX_CONSECUTIVE = 10


class SpikeDetector:
    """Test for losses far above the previous losses.

    The distance from the median is measured in units of the median absolute deviation (MAD). The factor
    0.6745 makes that a standard deviation for normally distributed losses: Iglewicz and Hoaglin, "How to
    Detect and Handle Outliers", 1993, formula of the modified z-score. Earlier outliers do not change it.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.losses: deque[float] = deque()
        self._sorted: list[float] = []

    def limit(self) -> float:
        if len(self._sorted) < _MIN_LOSSES:
            return math.inf
        middle = median(self._sorted)
        deviation = median(abs(loss - middle) for loss in self._sorted) / 0.6745
        deviation = max(deviation, _MIN_DEVIATION * abs(middle))
        return middle + self.threshold * deviation if deviation else math.inf

    def add(self, loss: float) -> None:
        self.losses.append(loss)
        insort(self._sorted, loss)
        if len(self.losses) > _WINDOW:
            del self._sorted[bisect_left(self._sorted, self.losses.popleft())]


class LossGuard:
    """Check of each step's loss; all ranks have the same losses and thus the same result."""

    def __init__(self, settings: TrainerConfig, *, has_scaler: bool) -> None:
        self._has_scaler, self._num_not_finite = has_scaler, 0
        self.policy = settings.on_bad_loss
        threshold = settings.loss_spike_threshold
        if threshold == "auto":
            threshold = None if self.policy == "stop" else _SPIKE_THRESHOLD
        self._spikes = None if self.policy is None or threshold is None else SpikeDetector(threshold)
        self.checks_norm = (
            self.policy is not None and settings.gradient_clip_norm is not None and not has_scaler
        )
        self.excluded_steps: set[int] = set()

    def find_problem(self, loss: float | None) -> str | None:
        """Describe the loss of a step if it is bad; otherwise, add it to the previous losses."""
        if self.policy is None or loss is None:
            return None
        self._num_not_finite = 0 if math.isfinite(loss) else self._num_not_finite + 1
        if self._num_not_finite:
            is_bad = not self._has_scaler or self._num_not_finite >= MAX_CONSECUTIVE
            return f"the loss is {loss}" if is_bad else None
        if self._spikes is None:
            return None
        if loss > (limit := self._spikes.limit()):
            return f"the loss is {loss:.6g}, above the spike limit of {limit:.6g}"
        self._spikes.add(loss)
        return None

    def find_problem_in(self, scalars: Mapping[str, float]) -> str | None:
        if self.policy is None or SKIPPED_FIELD in scalars:
            return None
        norm = scalars["grad_norm"] if self.checks_norm and "grad_norm" in scalars else 0.0
        if not math.isfinite(norm) and math.isfinite(scalars.get("loss", 0.0)):
            return f"the gradient norm is {norm}"
        return self.find_problem(scalars.get("loss"))

    def exclude_step(self, step: int) -> bool:
        """Record an excluded step; return False if too many consecutive steps are excluded."""
        self.excluded_steps.add(step)
        return any(earlier not in self.excluded_steps for earlier in range(step - MAX_CONSECUTIVE + 1, step))

    def state_dict(self) -> dict[str, Any]:
        losses = [] if self._spikes is None else list(self._spikes.losses)
        excluded_steps = sorted(self.excluded_steps)
        return {"losses": losses, "excluded_steps": excluded_steps, "num_not_finite": self._num_not_finite}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.excluded_steps.update(state.get("excluded_steps", ()))
        self._num_not_finite = state.get("num_not_finite", 0)
        if self._spikes is not None:
            self._spikes = SpikeDetector(self._spikes.threshold)
            for loss in state.get("losses", ()):
                self._spikes.add(loss)


def bad_loss(cause: str, reason: str, newest: str | None, policy: str | None, *, can_skip: bool) -> BadLoss:
    advice = ""
    if policy == "stop":
        advice = " To return to the last good checkpoint and exclude the batch, use on_bad_loss='rollback'."
        if can_skip:
            advice += " To skip the update of such a step, use 'skip'."
    error = BadLoss(
        f"{cause[0].upper()}{cause[1:]}. The run stops, because {reason}. Last good checkpoint: "
        f"{newest or 'none'}. Check the data of this step and the learning rate.{advice}"
    )
    mark_non_retryable(error)
    return error


def read_excluded_steps(events: Iterable[Event]) -> list[int]:
    """Return the steps that a run excluded when it returned to an earlier checkpoint."""
    return [
        event.step
        for event in events
        if event.kind == "bad_loss" and event.action == "rollback" and event.step
    ]
