"""Exchange trained steps between the ranks; callbacks, progress and metrics receive the results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Literal

import torch

from hpctrain.text import format_ranks
from hpctrain.training.base.metric_accumulator import SKIPPED_FIELD, MetricAccumulator
from hpctrain.training.components import Components
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.loop.evaluation import Validator
from hpctrain.training.loop.step_sync import StepFlags, StepSync
from hpctrain.training.observe.run_writer import StepResult
from hpctrain.training.saving.training_checkpoints import TrainingCheckpoints

_NO_REQUESTS = StepFlags()


class BadStep(Exception):
    """Signal for the training loop: a step has a bad loss, and its update is already applied."""

    def __init__(self, step: int, cause: str) -> None:
        super().__init__(cause)
        self.step, self.cause = step, cause


class StepExchange:
    """Exchange of metrics and requests after each step.

    The message of a step is sent during the next step, so no step waits, except before a validation, a save
    or a stop: no checkpoint is saved after a bad loss. If updates are to be skipped, the message contains the
    loss of the next step, and is received before its update.
    """

    def __init__(self, shared: Components, validator: Validator, checkpoints: TrainingCheckpoints) -> None:
        self._shared, self._validator, self._checkpoints = shared, validator, checkpoints
        self._guard = shared.state.loss_guard
        self._checks_early = self._guard.policy == "skip"
        self._sync = StepSync(
            shared.context,
            one_by_one=shared.source.exchanges_ends or shared.callbacks.wants_steps or self._checks_early,
            replica_check=shared.replica_check,
        )
        self._own_requests = self._requests = _NO_REQUESTS
        self._failed: BadStep | None = None

    def begin(self) -> None:
        self._sync.begin()

    def discard(self) -> None:
        self._sync.discard()

    def send_loss(self, unfinished: MetricAccumulator) -> None:
        self._sync.send(self._own_requests, unfinished)
        self._own_requests = _NO_REQUESTS

    def may_update(self, step: int, unfinished: MetricAccumulator) -> bool:
        """Return False if the step whose loss was sent is to be skipped."""
        # The step's own clock counts this wait, from the last gradient to the update.
        self._requests, results = self._receive(nullcontext())
        self._show(results)
        cause = self._guard.find_problem(self._sync.checked_loss)
        return cause is None or self._skip(step, cause, unfinished.values["loss"])

    def accepts_norm(self, step: int, norm: torch.Tensor | None) -> bool:
        if norm is None or not self._guard.checks_norm or math.isfinite(norm):
            return True
        return self._skip(step, f"the gradient norm is {norm.item()}", 0.0)

    def _skip(self, step: int, cause: str, own_loss: torch.Tensor | float) -> Literal[False]:
        cause = self._describe(step, cause, own_loss)
        if self._guard.exclude_step(step):
            self._shared.log.write_event("bad_loss", step=step, cause=cause, action="skip")
            self._shared.progress.print_message(f"hpctrain: {cause}, so the update of this step is skipped")
        else:
            self._failed = BadStep(step, cause)
        return False

    def complete_step(self, rank_batch: RankBatch, metrics: MetricAccumulator) -> StepFlags | None:
        """Exchange a trained step, and advance the state to it.

        Returns the requests of the ranks if a validation, a save or a stop follows this step; the state then
        contains the metrics of the step. Otherwise None: the metrics arrive during the next step.
        """
        shared, state, sync = self._shared, self._shared.state, self._sync
        state.step, state.epoch = rank_batch.step, rank_batch.epoch
        if self._failed is not None:
            raise self._failed
        before, self._requests = self._requests, _NO_REQUESTS
        if sync.is_pending:
            before, results = self._receive()
            self._show(results)
        state.finished = shared.source.finished or before.end
        is_joint = before.stop or before.save or self._checkpoints.due() or self._validator.due()
        if shared.replica_check is not None:
            shared.replica_check.add(state.step, whole=is_joint)
        if is_joint or self._checkpoints.copies.due():
            self._checkpoints.copies.wait()
            sync.add(state.step, state.epoch, metrics, None)
            sync.send(self._collect_requests())
            requests, (*earlier, latest) = self._receive()
            self._show(earlier)
            state.latest = latest.scalars
            state.finished = state.finished or requests.end
            return StepFlags(stop=before.stop or requests.stop, save=before.save or requests.save)
        ended = shared.step_timer.sample() if shared.log.is_logged(state.step) else None
        sync.add(state.step, state.epoch, metrics, ended)
        if self._checks_early:
            self._own_requests = self._collect_requests()
        elif sync.is_due:
            sync.send(self._collect_requests())
        return None

    def _collect_requests(self) -> StepFlags:
        shared = self._shared
        return StepFlags(
            stop=shared.stop.is_set,
            save=self._checkpoints.save_requested(),
            end=shared.callbacks.ending is not None,
            stream_ends=shared.source.local_ends(),
            copy_every=self._checkpoints.copies.wanted,
        )

    def _receive(
        self, timer: AbstractContextManager[None] | None = None
    ) -> tuple[StepFlags, list[StepResult]]:
        with timer or self._shared.compute_timer.exchange():
            requests, results = self._sync.read()
        self._shared.source.receive_ends(requests.stream_ends)
        self._checkpoints.copies.set_every(int(requests.copy_every))
        self._handle_results(results)
        return requests, results

    def _handle_results(self, results: Sequence[StepResult]) -> None:
        for count, result in enumerate(results, 1):
            if not self._checks_early and (cause := self._guard.find_problem_in(result.scalars)):
                # A step before a validation or a save has no time sample yet.
                timing = result.timing or self._shared.step_timer.sample()
                self._show([*results[: count - 1], replace(result, timing=timing)])
                cause = self._describe(result.step, cause, self._sync.own_loss(result.step))
                raise BadStep(result.step, cause)
            if SKIPPED_FIELD not in result.scalars:
                self._shared.callbacks.step_end(result.step, result.scalars)

    def _describe(self, step: int, cause: str, own_loss: torch.Tensor | float) -> str:
        finite = self._shared.context.all_gather(math.isfinite(own_loss))
        ranks = [rank for rank, is_finite in enumerate(finite) if not is_finite]
        origin = f" on {format_ranks(ranks)}" if ranks else ""
        return f"in step {step}, {cause}{origin}"

    def _show(self, results: Sequence[StepResult]) -> None:
        if results:
            self._shared.progress.show(results[-1].step, results[-1].scalars)
            self._shared.log.write_steps(results)
