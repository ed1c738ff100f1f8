"""Compute goodput ratios of a run, by published definitions, from the time breakdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.telemetry.accounting.time_breakdown import TimeBreakdown
from hpctrain.telemetry.accounting.timeline_events import TimeCategory
from hpctrain.text import is_finite

#: Time spent on validation, and on steps that were not repeated.
_PRODUCTIVE = (TimeCategory.TRAINING, TimeCategory.COMMUNICATING, TimeCategory.DATA, TimeCategory.VALIDATING)
#: Time of the steps themselves.
_STEPS = (TimeCategory.TRAINING, TimeCategory.COMMUNICATING, TimeCategory.DATA)


@dataclass(frozen=True)
class Goodput:
    """Ratios between 0 and 1; None if unknown, such as for a run that reports no steps."""

    ettr: float | None
    """Effective training time ratio: productive time divided by the time in which the run should progress.

    The definition is that of A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning
    Research Clusters", HPCA 2025, arXiv 2410.21680, section II. Steps that count and validation are
    productive; saving, loading, starting and lost work are not. Queue time is part of the denominator; idle
    time after the last step or between submissions is not.
    """
    training: float | None
    """Fraction of the total time spent on steps that count."""
    mfu: float | None = None
    """Model FLOPs utilisation: FLOPs of the steps that count, divided by the peak FLOPs of the GPUs.

    The definition is that of A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", JMLR 24,
    2023, arXiv 2204.02311, appendix B. Known only if the run logs `model_flops` and `peak_flops`.
    """


def compute_goodput(
    breakdown: TimeBreakdown, metrics: Iterable[Mapping[str, Any]] = (), first_step: int = 0
) -> Goodput:
    """Return the goodput ratios of a run.

    Args:
        breakdown: the time breakdown of the run.
        metrics: the metrics of the run, one record per step that counts. `model_flops` is the number of
            operations of the step on all ranks; `peak_flops` is the total peak rate of all GPUs, per second.
        first_step: number of steps before the run, if it began with an imported checkpoint.
    """
    if not breakdown.knows_lost_work:
        return Goodput(ettr=None, training=None)
    totals = breakdown.totals_us
    wanted_us = breakdown.wall_us - totals[TimeCategory.IDLE]
    productive_us, steps_us = (sum(totals[what] for what in kinds) for kinds in (_PRODUCTIVE, _STEPS))
    return Goodput(
        ettr=productive_us / wanted_us if wanted_us else None,
        training=steps_us / breakdown.wall_us if breakdown.wall_us else None,
        mfu=_mfu(steps_us / 1e6, metrics, first_step),
    )


def _mfu(seconds: float, metrics: Iterable[Mapping[str, Any]], first_step: int) -> float | None:
    done, peak, steps, last = 0.0, 0.0, 0, 0
    for record in metrics:
        flops, most, step = (record.get(name) for name in ("model_flops", "peak_flops", "step"))
        if is_finite(flops) and is_finite(most) and isinstance(step, int):
            done, peak, steps, last = done + flops, max(peak, most), steps + 1, max(last, step)
    if not steps or not seconds or not math.isfinite(done) or not 0 < peak < math.inf:
        return None
    # If only some steps are logged, their mean is used for all steps.
    return done / steps * max(0, last - first_step) / (peak * seconds)
