"""Which checkpoints stay. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpctrain.errors import UserError


@dataclass(frozen=True)
class Retention:
    """Which checkpoints stay when a newer one is there: all that any of these rules keeps.

    Raises:
        UserError: a rule is out of its range.
    """

    last: int = 3
    """So many newest ones, at least 1."""
    every: int | None = None
    """Those whose step is a multiple of this."""
    best: int = 0
    """So many with the best score."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a low score is better or a high one."""

    def __post_init__(self) -> None:
        for name, least in (("last", 1), ("every", 1), ("best", 0)):
            value = getattr(self, name)
            if value is None and name == "every":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise UserError(f"{name} is {value!r}; it must be a whole number of at least {least}.")
        if self.best_mode not in ("min", "max"):
            raise UserError(f"best_mode is {self.best_mode!r}; give 'min' or 'max'.")

    def kept(self, scores: Mapping[int, float | None]) -> set[int]:
        """The steps that stay, of those that there are; the newest is always among them.

        Args:
            scores: step → its score; None, or what is not a number, is never among the best.
        """
        steps = sorted(scores)
        stay = set(steps[-self.last :])
        if self.every is not None:
            stay.update(step for step in steps if step % self.every == 0)
        scored = {
            step: score for step, score in scores.items() if score is not None and not math.isnan(score)
        }
        sign = 1 if self.best_mode == "min" else -1
        # Among equals the newer one is better: it is further trained.
        stay.update(sorted(scored, key=lambda step: (sign * scored[step], -step))[: self.best])
        return stay

    def may_skip(self, step: int, score: float | None) -> bool:
        """Whether a checkpoint is kept only while it is among the newest."""
        pinned = self.every is not None and step % self.every == 0
        return not pinned and (score is None or self.best == 0)
