"""Validations of a training run: schedule, and use of the results."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.errors import UserError
from hpctrain.records.rank_phase import RankPhase
from hpctrain.runtime.rank_activity import activity
from hpctrain.training.components import Components
from hpctrain.training.data.dataset_adapters import ValidationSet
from hpctrain.training.loop.evaluation import run_validation
from hpctrain.training.observe.progress import format_scalars
from hpctrain.training.optim.micro_batch_size import preserve_state, snapshot_buffers


class Validator:
    """Validations of the module during training."""

    def __init__(self, parts: Components, data: ValidationSet | None) -> None:
        """Prepare validations on `data`; None for no validation."""
        self._parts, self._state, self._data = parts, parts.state, data
        self._every = None if data is None else parts.settings.validate_every
        #: Metrics that the training has, too.
        self._shared_names = {"loss"}

    def limit_batches(self, num_samples: int | None) -> None:
        """Limit the samples of a rank's batch; None does not limit them."""
        if self._data is not None:
            self._data.max_batch_size = num_samples

    def due(self) -> bool:
        """Return true if a validation is due and did not already run before a stop at this step."""
        every, state = self._every, self._state
        if every is None or state.step in (0, state.validated_step):
            return False
        return state.finished or (
            self._parts.source.at_epoch_end if every == "epoch" else state.step % every == 0
        )

    def run(self) -> bool:
        """Validate; return False, with unchanged state, if the ranks agreed to stop meanwhile."""
        assert self._data is not None
        parts, state = self._parts, self._state
        # Checkpoints do not contain a callback's request to end, so this validation must not be interrupted.
        stop = None if state.finished and not parts.source.finished else parts.stop
        put_back = snapshot_buffers(parts.module)
        with activity.in_phase(RankPhase.VALIDATE), parts.step_timer.measure("validation"):
            results = run_validation(parts.strategy, self._data, stop=stop)
        if results is None:
            put_back()
            return False
        # `loss` without prefix is the training loss. An excluded step has no metrics.
        self._shared_names |= results.keys() & state.latest.keys()
        results = {
            f"val_{name}" if name in self._shared_names else name: mean for name, mean in results.items()
        }
        state.validation, state.validated_step = results, state.step
        state.latest = {**state.latest, **state.validation}
        parts.progress.print_message(f"step {state.step}: {format_scalars(state.validation)}")
        parts.callbacks.validation_end(state.step, state.validation)
        parts.end_if_requested()
        return True

    def check_sanity(self) -> None:
        """Validate a few batches, to detect errors in the validation immediately."""
        parts = self._parts
        if self._data is None or self._every is None:
            return
        if num_batches := parts.settings.sanity_val_batches:
            with preserve_state(parts.module):
                results = run_validation(parts.strategy, self._data, num_batches=num_batches)
            self._check_names(results or {})

    def _check_names(self, results: Mapping[str, float]) -> None:
        """Check that validation returns the metrics that callbacks and `keep_best` use.

        Raises:
            UserError: a metric is missing.
        """
        # Names shared with the training have the prefix "val_"; at this point, only `loss` is known to be
        # shared.
        given = {"val_loss" if name == "loss" else name for name in results}
        accepted = {*given, *(f"val_{name}" for name in results)}
        self._parts.callbacks.check_names(given, accepted)
        settings = self._parts.settings
        metric = settings.monitor
        if settings.keep_best and metric.startswith("val_") and metric not in accepted:
            raise UserError(
                f"keep_best={settings.keep_best} selects checkpoints by monitor={metric!r}, but "
                f"validation returned only these metrics: {', '.join(sorted(given))}."
            )
