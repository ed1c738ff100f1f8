"""Choose which checkpoints are kept, and which are deleted."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import UserError
from hpctrain.rundir import rank_steps


@dataclass(frozen=True)
class Retention:
    last: int = 3
    every: int | None = None
    """Keep the checkpoints whose step is a multiple of this number; None keeps none by this rule."""
    best: int = 0
    """Number of checkpoints with the best score to keep."""
    mode: Literal["min", "max"] = "min"
    """Direction of the score: "min" if lower is better, "max" if higher is better."""
    metric: str | None = None
    """Name of the metric of the score. Scores of other metrics do not count."""

    def __post_init__(self) -> None:
        for name, minimum in (("last", 1), ("every", 1), ("best", 0)):
            value = getattr(self, name)
            if value is None and name == "every":
                continue
            if type(value) is not int or value < minimum:
                raise UserError(f"{name} is {value!r}, but must be an integer of at least {minimum}.")
        if self.mode not in ("min", "max"):
            raise UserError(f"mode is {self.mode!r}, but must be 'min' or 'max'.")

    def steps_to_keep(
        self,
        scores: Mapping[int, float | None],
        not_finite: Set[int] = frozenset(),
        verified_step: int | None = None,
    ) -> set[int]:
        """Return the steps to keep, with the newest, the newest finite and the newest verified one."""
        steps = sorted(scores)
        stay = {*steps[-self.last :], *sorted(scores.keys() - not_finite)[-1:]}
        if verified_step is not None:
            stay.update([step for step in steps if step <= verified_step][-1:])
        if self.every is not None:
            stay.update(step for step in steps if step % self.every == 0)
        stay.update(rank_steps(scores, self.mode)[: self.best])
        return stay

    def may_skip(self, step: int, score: float | None) -> bool:
        """Return true if a checkpoint is kept only while it is among the newest."""
        pinned = self.every is not None and step % self.every == 0
        return not pinned and (score is None or self.best == 0)


#: Deletes no checkpoint.
KEEP_ALL = Retention(last=2**31)
