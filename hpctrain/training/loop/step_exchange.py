"""Exchange of trained steps between the ranks; callbacks, progress and metrics receive the results."""

from __future__ import annotations

from collections.abc import Sequence

from hpctrain.training.base.metric_accumulator import MetricAccumulator
from hpctrain.training.components import Components
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.loop.step_sync import StepFlags, StepSync
from hpctrain.training.loop.validator import Validator
from hpctrain.training.observe.run_writer import StepResult
from hpctrain.training.saving.training_checkpoints import TrainingCheckpoints

_NO_REQUESTS = StepFlags()


class StepExchange:
    """Exchange of metrics and requests after each step.

    The message of a step is sent during the next step, so no step waits. The exception is a step after which
    all ranks validate, save or stop.
    """

    def __init__(self, parts: Components, validator: Validator, checkpoints: TrainingCheckpoints) -> None:
        self._parts, self._validator, self._checkpoints = parts, validator, checkpoints
        self._sync = StepSync(
            parts.context, one_by_one=parts.source.exchanges_ends or parts.callbacks.wants_steps
        )

    def begin(self) -> None:
        """Restart the clock at the first step and after other work of the ranks."""
        self._sync.begin()

    def complete_step(self, rank_batch: RankBatch, metrics: MetricAccumulator) -> StepFlags | None:
        """Exchange a trained step, and advance the state to it. All ranks must call this.

        Args:
            rank_batch: this rank's part of the batch.
            metrics: this rank's part of the metrics.

        Returns:
            The requests of the ranks if a validation, a save or a stop follows this step; the state then
            contains the metrics of the step. Otherwise None: the metrics arrive during the next step.
        """
        parts, state, sync = self._parts, self._parts.state, self._sync
        state.step, state.epoch = rank_batch.step, rank_batch.epoch
        before = _NO_REQUESTS
        if sync.is_pending:
            before, results = self._receive()
            self._show(results)
        state.finished = parts.source.finished or before.end
        if before.stop or before.save or self._checkpoints.due() or self._validator.due():
            sync.add(state.step, state.epoch, metrics, None)
            self._send()
            now, (*earlier, latest) = self._receive()
            self._show(earlier)
            state.latest = latest.scalars
            state.finished = state.finished or now.end
            return StepFlags(stop=before.stop or now.stop, save=before.save or now.save)
        ended = parts.step_timer.sample() if parts.log.is_logged(state.step) else None
        sync.add(state.step, state.epoch, metrics, ended)
        if sync.is_due:
            self._send()
        return None

    def _send(self) -> None:
        """Send this rank's unsent steps and requests."""
        parts = self._parts
        self._sync.send(
            StepFlags(
                stop=parts.stop.is_set,
                save=self._checkpoints.save_requested(),
                end=parts.callbacks.ending is not None,
                stream_ends=parts.source.local_ends(),
            )
        )

    def _receive(self) -> tuple[StepFlags, list[StepResult]]:
        with self._parts.compute_timer.exchange():
            requests, results = self._sync.read()
        self._parts.source.receive_ends(requests.stream_ends)
        for result in results:
            self._parts.callbacks.step_end(result.step, result.scalars)
        return requests, results

    def _show(self, results: Sequence[StepResult]) -> None:
        """Show the latest of `results`, and log the results that are due."""
        if results:
            self._parts.progress.show(results[-1].step, results[-1].scalars)
            self._parts.log.write_steps(results)
