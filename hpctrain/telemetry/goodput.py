"""What a run's time was worth: ratios of its ledger, each by a published definition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hpctrain.telemetry.ledger import Ledger
from hpctrain.telemetry.marks import is_finite
from hpctrain.telemetry.spans import What

#: Time in which steps that count were trained, whatever held them up meanwhile.
_PRODUCTIVE = (What.TRAINING, What.COMMUNICATING, What.DATA, What.VALIDATING)
#: Time of the steps themselves.
_STEPS = (What.TRAINING, What.COMMUNICATING, What.DATA)


@dataclass(frozen=True)
class Goodput:
    """Ratios between 0 and 1; None where nothing is known."""

    ettr: float | None
    """Effective training time ratio: productive time over the time in which the run was wanted, that in the
    queue included (A. Kokolis et al., "Revisiting Reliability in Large-Scale Machine Learning Research
    Clusters", HPCA 2025, arXiv 2410.21680, section II). Productive is what trained steps that count, or
    validated; saving, loading, starting and lost work are not. That the run had ended, and nobody had asked
    it to go on, counts on neither side."""
    training: float | None
    """The share of all time in which steps that count were trained."""
    mfu: float | None = None
    """Model FLOPs utilisation: the model's floating-point operations of the steps that count over what the
    GPUs could have done in that time (A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways",
    JMLR 24, 2023, arXiv 2204.02311, appendix B). Only of a run that logs `model_flops` and `peak_flops`."""


def goodput_of(ledger: Ledger, metrics: Iterable[Mapping[str, Any]] = ()) -> Goodput:
    """The ratios of a run.

    Args:
        ledger: where its time went.
        metrics: its metrics, of each step the line that counts. `model_flops` is the number of operations of
            the step, all ranks together; `peak_flops` what all GPUs together can do in a second.
    """
    totals = ledger.totals_us
    wanted_us = ledger.wall_us - totals[What.IDLE]
    productive_us, steps_us = (sum(totals[what] for what in kinds) for kinds in (_PRODUCTIVE, _STEPS))
    return Goodput(
        ettr=productive_us / wanted_us if wanted_us else None,
        training=steps_us / ledger.wall_us if ledger.wall_us else None,
        mfu=_mfu(steps_us / 1e6, metrics),
    )


def _mfu(seconds: float, metrics: Iterable[Mapping[str, Any]]) -> float | None:
    done, peak, steps, last = 0.0, 0.0, 0, 0
    for record in metrics:
        flops, most, step = (record.get(name) for name in ("model_flops", "peak_flops", "step"))
        if is_finite(flops) and is_finite(most) and isinstance(step, int):
            done, peak, steps, last = done + flops, max(peak, most), steps + 1, max(last, step)
    if not steps or not seconds or not math.isfinite(done) or not 0 < peak < math.inf:
        return None
    # Where only some steps are logged, they stand for the others.
    return done / steps * last / (peak * seconds)
