"""How the ranks share the work. Siblings never import each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

from hpctrain.errors import UserError
from hpctrain.runtime.process_group import Team
from hpctrain.training.module import Module
from hpctrain.training.strategies.ddp import DDP
from hpctrain.training.strategies.ddp2 import DDP2


class Strategy(Protocol):
    """Wraps a module so that a backward pass leaves the mean gradient of the global batch on every rank."""

    def training_step(self, batch: Any, batch_idx: int, num_samples: int) -> tuple[Any, float]:
        """Return what the module's training step does, and the number of samples that it stands for."""

    def accumulating(self) -> AbstractContextManager[None]:
        """Forward and backward passes meanwhile only add to this rank's gradients."""

    def align_buffers(self) -> None:
        """Make the module's buffers equal on all ranks, before it is validated or saved."""


#: What the job asks for; the template ddp2 sets it.
STRATEGY_VARIABLE = "HPCTRAIN_STRATEGY"

_STRATEGIES: dict[str, Callable[[Module, Team], Strategy]] = {"ddp": DDP, "ddp2": DDP2}


def find_strategy(name: str, environ: Mapping[str, str]) -> Callable[[Module, Team], Strategy]:
    """The strategy of that name; for "auto" the one that the job asks for, or else ddp.

    Raises:
        UserError: there is none.
    """
    origin = "strategy"
    if name == "auto":
        name, origin = environ.get(STRATEGY_VARIABLE) or "ddp", STRATEGY_VARIABLE
    if name not in _STRATEGIES:
        raise UserError(f"{origin} is {name!r}; known are {', '.join(map(repr, _STRATEGIES))}.")
    return _STRATEGIES[name]
