"""Call back at fixed points of training, and stop early."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Literal

from hpctrain.errors import UserError
from hpctrain.text import format_number, pluralize

if TYPE_CHECKING:
    from hpctrain.training.module import Module


class Callback:
    """Base class of callbacks: override the methods you need.

    Every rank calls every method, at the same step and with the same metrics. `trainer.end()` ends training:
    immediately after a validation, otherwise one or two steps later. Checkpoints contain the result of
    `state_dict`.
    """

    def on_fit_start(self, trainer: Any, module: Module) -> None:
        """Called after the newest checkpoint, if any, is loaded; `trainer.step` steps are completed."""

    def on_step_end(self, trainer: Any, module: Module, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of step `trainer.step`, one step later, to avoid delays."""

    def on_validation_end(self, trainer: Any, module: Module, metrics: Mapping[str, float]) -> None:
        """Called after the validation that follows step `trainer.step`."""

    def on_fit_end(self, trainer: Any, module: Module) -> None:
        """Called at the end of training, but not when the run stops to be continued by another job."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: plain values and tensors, identical on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""


class EarlyStopping(Callback):
    """Callback that ends training when a metric no longer improves.

    Attributes:
        best: the best value so far; None before the first validation.
        waited: number of validations since the best value.
    """

    def __init__(
        self,
        metric: str = "val_loss",
        *,
        patience: int = 3,
        mode: Literal["min", "max"] = "min",
        min_delta: float = 0.0,
    ) -> None:
        """End training after `patience` consecutive validations without a better value.

        Args:
            metric: name of a value that `validation_step` returns.
            patience: number of validations, at least 1.
            mode: "min" if lower values are better, "max" if higher values are better.
            min_delta: minimum improvement that counts.
        """
        if type(patience) is not int or patience < 1 or mode not in ("min", "max") or not min_delta >= 0:
            raise UserError(
                f"EarlyStopping received patience={patience!r}, mode={mode!r} and min_delta={min_delta!r}, "
                "but patience must be an integer of at least 1, mode must be 'min' or 'max', and min_delta "
                "must be at least 0."
            )
        self.metric, self.patience, self.mode, self.min_delta = metric, patience, mode, min_delta
        self.best: float | None = None
        self.waited = 0

    def on_fit_start(self, trainer: Any, _module: Module) -> None:
        """End a resumed run immediately if training had already ended, unless the patience was increased."""
        if trainer.step == 0:  # the callback may have been used in another training
            self.best, self.waited = None, 0
        self._end_if_due(trainer)

    def on_validation_end(self, trainer: Any, _module: Module, metrics: Mapping[str, float]) -> None:
        if self.metric not in metrics:
            raise self.missing_metric_error(metrics.keys())
        value = metrics[self.metric]
        sign = 1 if self.mode == "min" else -1
        if not math.isnan(value) and (self.best is None or sign * (self.best - value) > self.min_delta):
            self.best, self.waited = value, 0
        else:
            self.waited += 1
        self._end_if_due(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited = state["best"], state["waited"]

    def missing_metric_error(self, names: Set[str]) -> UserError:
        return UserError(
            f"EarlyStopping monitors {self.metric!r}, but validation returned only these metrics: "
            f"{', '.join(sorted(names))}."
        )

    def _end_if_due(self, trainer: Any) -> None:
        if self.waited >= self.patience:
            reached = "was NaN" if self.best is None else f"did not improve on {format_number(self.best)}"
            trainer.end(f"{self.metric} {reached} in {pluralize(self.waited, 'validation run')}")


class CallbackList(list[Callback]):
    """All callbacks of a training run, in order; `trainer` is a `Session` in a custom loop."""

    def __init__(self, callbacks: Sequence[Callback], trainer: Any, module: Module) -> None:
        super().__init__(callbacks)
        self._trainer, self._module = trainer, module

    @property
    def wants_steps(self) -> bool:
        return any(map(_wants_steps, self))

    def check(self, *, validates: bool) -> None:
        for callback in self:
            if isinstance(callback, EarlyStopping) and not (validates or _wants_steps(callback)):
                raise UserError(
                    f"EarlyStopping monitors {callback.metric!r}, but this run has no validation. Define "
                    "validation_step, pass a validation set and set validate_every, or remove "
                    "EarlyStopping."
                )

    def check_names(self, names: Set[str], accepted: Set[str]) -> None:
        for callback in self:
            if type(callback) is EarlyStopping and callback.metric not in accepted:
                raise callback.missing_metric_error(names)

    @property
    def ending(self) -> str | None:
        ending: str | None = self._trainer.ending
        return ending

    def call(self, method: str, step: int, *arguments: Any) -> None:
        """Call a method of all callbacks after `step`, with the trainer, the module and `arguments`."""
        for callback in self:
            self._trainer.step = step
            if method == "on_validation_end":
                self._trainer.metrics = dict(*arguments)
            getattr(callback, method)(self._trainer, self._module, *arguments)

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self._named()}

    def load_state_dict(self, states: Mapping[str, Any]) -> None:
        for name, callback in self._named():
            if name in states:  # new callbacks have no state
                callback.load_state_dict(states[name])

    def _named(self) -> Iterator[tuple[str, Callback]]:
        """Yield the callbacks with the names of their classes, with a number for repeated classes."""
        counts: Counter[str] = Counter()
        for callback in self:
            kind = type(callback).__qualname__
            counts[kind] += 1
            yield kind if counts[kind] == 1 else f"{kind}-{counts[kind]}", callback


def _wants_steps(callback: Callback) -> bool:
    return type(callback).on_step_end is not Callback.on_step_end
