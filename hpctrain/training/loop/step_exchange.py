"""Exchange trained steps between the ranks; callbacks, progress and metrics receive the results.

All ranks read the same sums at the same step, and thus agree on a stop without further messages. Short steps
share a message (see `MessageBatcher`), with bitwise the same results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Literal, NamedTuple

import torch

from hpctrain.errors import UserError
from hpctrain.record_types import RESERVED_FIELDS
from hpctrain.text import format_ranks
from hpctrain.training.base.metric_accumulator import (
    SKIPPED_FIELD,
    TOKENS_FIELD,
    MetricAccumulator,
    exact_sum,
)
from hpctrain.training.components import Components
from hpctrain.training.data.batch_plan import RankBatch
from hpctrain.training.loop.step_sync import MAX_GATHER_RANKS, MessageBatcher, send_sum
from hpctrain.training.loop.validation import Validator
from hpctrain.training.observe.run_writer import StepResult
from hpctrain.training.observe.step_timers import TimingSample
from hpctrain.training.replica_check import NUMBERS_PER_MESSAGE
from hpctrain.training.saving.training_checkpoints import TrainingCheckpoints


class StepFlags(NamedTuple):
    """Requests of a rank, or combined requests of all ranks."""

    stop: bool = False
    save: bool = False
    end: bool = False
    """The training should end with the current steps."""
    stream_ends: float = 0.0
    """Value from the step source, to be summed over all ranks."""
    copy_every: float = 0.0
    """Steps between two copies of the state in memory, as chosen by rank 0; 0 on other ranks."""


class _RecordedStep(NamedTuple):
    step: int
    epoch: int
    sums: MetricAccumulator
    ended: TimingSample | None


_NO_REQUESTS = StepFlags()


class BadStep(Exception):
    """Signal for the training loop: a step has a bad loss, and its update is already applied."""

    def __init__(self, step: int, cause: str) -> None:
        super().__init__(cause)
        self.step, self.cause = step, cause


class StepExchange:
    """Exchange of metrics and requests after each step.

    The message of a step is sent during the next step, so no step waits, except before a validation, a save
    or a stop, or before an update that may be skipped: no checkpoint is saved after a bad loss.
    """

    def __init__(self, shared: Components, validator: Validator, checkpoints: TrainingCheckpoints) -> None:
        self._shared, self._validator, self._checkpoints = shared, validator, checkpoints
        self._context, self._guard = shared.context, shared.state.loss_guard
        self._checks_early = self._guard.policy == "skip"
        one_by_one = shared.source.exchanges_ends or shared.callbacks.wants_steps or self._checks_early
        self._batcher = MessageBatcher(
            one_by_one=one_by_one or shared.context.ranks.world_size > MAX_GATHER_RANKS
        )
        self._recorded: list[_RecordedStep] = []
        self._sent: list[_RecordedStep] = []
        self._names: list[str] | None = None
        self._read: Callable[[], list[float]] | None = None
        #: Loss of the unfinished step that was sent last, while the message contains one.
        self._checked_loss: float | None = None
        self._own_requests = self._requests = _NO_REQUESTS
        self._failed: BadStep | None = None

    def begin(self) -> None:
        self._batcher.reset()

    def discard(self) -> None:
        self._recorded = []

    def send_loss(self, unfinished: MetricAccumulator) -> None:
        self._send(self._own_requests, unfinished)
        self._own_requests = _NO_REQUESTS

    def may_update(self, step: int, unfinished: MetricAccumulator) -> bool:
        """Return False if the step whose loss was sent is to be skipped."""
        # The step's own clock counts this wait, from the last gradient to the update.
        self._requests, results = self._receive(nullcontext())
        self._show(results)
        assert self._checked_loss is not None
        cause = self._guard.find_problem(self._checked_loss)
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
        """Exchange a trained step; return the requests if a validation, a save or a stop follows it."""
        shared, state = self._shared, self._shared.state
        state.step, state.epoch = rank_batch.step, rank_batch.epoch
        if self._failed is not None:
            raise self._failed
        before, self._requests = self._requests, _NO_REQUESTS
        if self._read is not None:
            before, results = self._receive()
            self._show(results)
        state.finished = shared.source.finished or before.end
        is_joint = before.stop or before.save or self._checkpoints.due() or self._validator.due()
        if shared.replica_check is not None:
            shared.replica_check.add(state.step, whole=is_joint)
        if is_joint or self._checkpoints.copies.due():
            self._checkpoints.copies.wait()
            self._record(metrics, None)
            self._send(self._collect_requests())
            requests, (*earlier, latest) = self._receive()
            self._show(earlier)
            state.latest = latest.scalars
            state.finished = state.finished or requests.end
            return StepFlags(stop=before.stop or requests.stop, save=before.save or requests.save)
        self._record(metrics, shared.step_timer.sample() if shared.log.is_logged(state.step) else None)
        if self._checks_early:
            self._own_requests = self._collect_requests()
        elif self._batcher.is_full:
            self._send(self._collect_requests())
        return None

    def _record(self, metrics: MetricAccumulator, timing: TimingSample | None) -> None:
        self._recorded.append(
            _RecordedStep(self._shared.state.step, self._shared.state.epoch, metrics, timing)
        )
        self._batcher.add()

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
            requests, results = self._read_results()
        self._shared.source.receive_ends(requests.stream_ends)
        self._checkpoints.copies.set_every(int(requests.copy_every))
        self._handle_results(results)
        return requests, results

    def _send(self, requests: StepFlags, unfinished: MetricAccumulator | None = None) -> None:
        """Send the recorded steps, this rank's requests, and the loss of an unfinished step, if given."""
        flags = [*map(float, requests), self._batcher.seconds_per_item()]
        self._sent, self._recorded = self._recorded, []
        if self._names is None and self._sent:
            self._names = self._agreed_names()
        # Messages have the same length on all ranks. A rank with other names sends zeros and sets a flag.
        names = dict.fromkeys(self._names or ()).keys()
        names_differ = any(record.sums.values.keys() != names for record in self._sent)
        values = self._values()
        if names_differ:
            values = [torch.zeros(len(names) * r.sums.width, dtype=torch.float64) for r in self._sent]
        self._checked_loss = None
        if unfinished is not None:
            self._checked_loss = 0.0
            values += [unfinished.values.get(name, 0.0) for name in ("loss", TOKENS_FIELD)]
        if self._shared.replica_check is not None:
            values = [*self._shared.replica_check.message(), *values]
        self._read = send_sum(self._context, [*flags, float(names_differ)], values)

    def _read_results(self) -> tuple[StepFlags, list[StepResult]]:
        """Wait for the sum over all ranks, which was started a step earlier."""
        assert self._read is not None
        stop, save, end, stream_ends, copy_every, seconds, names_differ, *values = self._read()
        self._read = None
        if self._shared.replica_check is not None:
            self._shared.replica_check.verify(values[:NUMBERS_PER_MESSAGE])
            values = values[NUMBERS_PER_MESSAGE:]
        if self._checked_loss is not None:
            *values, loss, tokens = values
            self._checked_loss = loss / (tokens or 1.0)
        self._batcher.adapt(seconds / self._context.ranks.world_size)
        if names_differ:
            self._names = self._agreed_names()
            values = send_sum(self._context, [], self._values())()
        results, numbers = [], iter(values)
        for record in self._sent:
            # The names are the first argument, so that zip does not consume an extra value of `numbers`.
            names, width = sorted(record.sums.values), record.sums.width
            if width == 1:
                scalars = dict(zip(names, numbers, strict=False))
            else:
                scalars = {name: exact_sum(islice(numbers, width)) for name in names}
            if scalars.get(TOKENS_FIELD):
                scalars["loss"] /= scalars[TOKENS_FIELD]
            results.append(StepResult(record.step, record.epoch, scalars, record.ended))
        return StepFlags(stop > 0, save > 0, end > 0, stream_ends, copy_every), results

    def _values(self) -> list[torch.Tensor | float]:
        return [record.sums.values[name] for record in self._sent for name in sorted(record.sums.values)]

    def _agreed_names(self) -> list[str]:
        rank_names = [sorted(record.sums.values) for record in self._sent]
        gathered = self._context.all_gather(rank_names)
        for rank, names_of_steps in enumerate(gathered):
            for record, expected, names in zip(self._sent, gathered[0], names_of_steps, strict=True):
                if names != expected:
                    raise UserError(
                        f"The metrics of step {record.step} are {expected} on rank 0, but {names} on rank "
                        f"{rank}. Use the same metric names on every rank."
                    )
        if taken := sorted(set(rank_names[-1]).intersection(RESERVED_FIELDS)):
            raise UserError(
                f"A metric is named {taken[0]!r}, which is reserved in metrics.jsonl. Rename the metric."
            )
        return rank_names[-1]

    def _handle_results(self, results: Sequence[StepResult]) -> None:
        for count, result in enumerate(results, 1):
            if not self._checks_early and (cause := self._guard.find_problem_in(result.scalars)):
                # A step before a validation or a save has no time sample yet.
                timing = result.timing or self._shared.step_timer.sample()
                self._show([*results[: count - 1], replace(result, timing=timing)])
                cause = self._describe(result.step, cause, self._loss_of_rank(result.step))
                raise BadStep(result.step, cause)
            if SKIPPED_FIELD not in result.scalars:
                self._shared.callbacks.call("on_step_end", result.step, result.scalars)

    def _loss_of_rank(self, step: int) -> float:
        losses = (record.sums.values.get("loss", 0.0) for record in self._sent if record.step == step)
        loss = next(losses, 0.0)
        return float(loss.sum()) if isinstance(loss, torch.Tensor) else loss

    def _describe(self, step: int, cause: str, own_loss: torch.Tensor | float) -> str:
        finite = self._context.all_gather(math.isfinite(own_loss))
        ranks = [rank for rank, is_finite in enumerate(finite) if not is_finite]
        origin = f" on {format_ranks(ranks)}" if ranks else ""
        return f"in step {step}, {cause}{origin}"

    def _show(self, results: Sequence[StepResult]) -> None:
        if results:
            self._shared.progress.show(results[-1].step, results[-1].scalars)
            self._shared.log.write_steps(results)
