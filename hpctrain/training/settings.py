"""What a user may set about training, checked as soon as it is set."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from hpctrain.errors import UserError
from hpctrain.training.precision import check_precision
from hpctrain.training.strategies import find_strategy


@dataclass(kw_only=True)
class Settings:
    """The settings of a `Trainer`.

    Raises:
        UserError: a setting is out of its range or unknown, or neither or both of `max_steps` and
            `max_epochs` are given.
    """

    max_steps: int | None = None
    """Optimizer steps after which training ends."""
    max_epochs: int | None = None
    """Passes over the training set after which training ends; instead of `max_steps`."""
    global_batch_size: int = 32
    """Samples in an optimizer step, on all ranks together; the same on any number of ranks."""
    strategy: str = "ddp"
    """How ranks share the work."""
    precision: str = "32"
    """`32`, or `bf16-mixed`: forward pass in bfloat16, weights in float32."""
    checkpoint_every: int | Literal["auto"] | None = "auto"
    """Save after every so many steps; `auto` balances the time that saving takes against the work that an
    interruption costs. A stop and the end of training save in any case."""
    keep_checkpoints: int = 3
    """Number of newest checkpoints to keep."""
    validate_every: int | Literal["epoch"] | None = "epoch"
    """Validate after every so many steps, or at the end of each epoch; and at the end of training."""
    log_every: int = 1
    """Write every so many steps to `metrics.jsonl`."""
    seed: int = 0
    """Decides initial weights, data order and dropout."""
    record_samples: bool = False
    """Write the indices of all trained samples to `samples/`."""
    run_dir: str | os.PathLike[str] | None = None
    """Where to write; the run's own folder by default. Without either nothing is written."""
    num_workers: int = 0
    """Processes that load data for each rank; 0 loads in the rank itself."""
    collate_fn: Callable[[list[Any]], Any] | None = None
    """Makes a batch out of samples; torch's default otherwise."""

    def __post_init__(self) -> None:
        if (self.max_steps is None) == (self.max_epochs is None):
            raise UserError(
                f"max_steps is {self.max_steps!r} and max_epochs is {self.max_epochs!r}; give one of the two."
            )
        for name in ("max_steps", "max_epochs", "global_batch_size", "keep_checkpoints", "log_every"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise UserError(f"{name} is {value!r}; it must be a whole number of at least 1.")
        if self.num_workers < 0:
            raise UserError(f"num_workers is {self.num_workers}; it must be at least 0.")
        _check_every("checkpoint_every", self.checkpoint_every, "auto")
        _check_every("validate_every", self.validate_every, "epoch")
        check_precision(self.precision)
        find_strategy(self.strategy)


def _check_every(name: str, value: object, word: str) -> None:
    if value is None or value == word or (isinstance(value, int) and value is not True and value > 0):
        return
    raise UserError(f"{name} is {value!r}; give a number of steps of at least 1, {word!r} or None.")
