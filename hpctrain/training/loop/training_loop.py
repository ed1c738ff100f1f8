"""Training loop: resume; train, exchange, validate and save in each step; stop or finish."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import closing, nullcontext
from typing import NoReturn

from hpctrain.errors import BadLoss
from hpctrain.records.rank_phase import RankPhase
from hpctrain.runtime.rank_activity import activity
from hpctrain.text import pluralize
from hpctrain.training.base import rng
from hpctrain.training.base.metric_accumulator import MetricAccumulator
from hpctrain.training.components import Components
from hpctrain.training.data.step_source import StepData
from hpctrain.training.loop.evaluation import Validator
from hpctrain.training.loop.step_exchange import BadStep, StepExchange
from hpctrain.training.loop.train_step import TrainStep
from hpctrain.training.module import is_manual
from hpctrain.training.observe.environment_info import can_request_cpus, count_rank_cpus, warn_too_few_workers
from hpctrain.training.observe.logger_process import LoggerProcess
from hpctrain.training.observe.loss_guard import MAX_CONSECUTIVE, bad_loss
from hpctrain.training.observe.run_writer import StepResult
from hpctrain.training.optim.resumed_values import check_ends, inner_scheduler
from hpctrain.training.optim.step_transforms import activation_checkpointing, compile_steps
from hpctrain.training.saving.training_checkpoints import TrainingCheckpoints

_TRAINER_REMEDY = (
    "To change the value in a resumed run, set it in trainer.optimizers or trainer.schedulers, in the "
    "on_fit_start() of a callback, which runs after the checkpoint is loaded."
)
_SESSION_REMEDY = "To change the value in a resumed run, set it in the first iteration of the loop."


class TrainingLoop:
    """Loop of a training run, created by `build_training_loop`."""

    def __init__(
        self,
        parts: Components,
        train_step: TrainStep,
        validator: Validator,
        loggers: LoggerProcess,
        checkpoints: TrainingCheckpoints,
    ) -> None:
        self._parts, self.train_step, self._validator = parts, train_step, validator
        self._loggers, self._checkpoints = loggers, checkpoints
        self._exchange = StepExchange(parts, validator, checkpoints)
        if parts.state.loss_guard.policy == "skip":
            train_step.loss_check = self._exchange
        self._cpus = count_rank_cpus(parts.context.ranks.local_world_size)
        self._has_warned = False
        self.state, self.last_step = parts.state, parts.source.last_step
        self.metrics = MetricAccumulator()

    def run(self) -> None:
        """Resume, and train until the last step or an agreed stop."""
        timer = self._parts.step_timer
        with closing(self.steps(advances_schedules=True)) as steps:
            for step in steps:
                micro_batches = step.micro_batches
                if step.num_micro_batches > 1:
                    micro_batches = timer.timed(micro_batches)
                self.train_step.run(step, micro_batches, self.metrics)

    def steps(self, *, advances_schedules: bool = False) -> Generator[StepData, None, None]:
        """Resume, and yield each step; the caller trains the step and adds to `metrics`."""
        parts, settings = self._parts, self._parts.settings
        rng.seed_all(rng.derive_seed(settings.seed, "rank", parts.context.ranks.rank))
        determinism = self.state.determinism
        with (
            nullcontext() if determinism is None else determinism.deterministic_algorithms(),
            parts.progress,
            self._loggers,
            self._checkpoints,
            activation_checkpointing(parts.module, settings.recompute),
            compile_steps(parts.module, settings.compile),
            closing(parts.source),
        ):
            self._resume(advances_schedules=advances_schedules)
            while not self.state.finished:
                try:
                    yield from self._steps()
                except BadStep as bad:
                    self._roll_back(bad)
            parts.context.barrier()
            parts.callbacks.fit_end()
        activity.set_phase(RankPhase.END)
        self._print_hint(parts.strategy.finish())

    def _steps(self) -> Iterator[StepData]:
        parts, state = self._parts, self.state
        parts.step_timer.sample()
        self._exchange.begin()
        steps = parts.source.steps()
        for step in parts.step_timer.timed(steps):
            self.metrics = MetricAccumulator()
            if step.rank_batch.step in state.loss_guard.excluded_steps:
                self.train_step.exclude_step(step, self.metrics)
            else:
                parts.log.write_samples(step.rank_batch)
                parts.compute_timer.begin()
                yield step
                parts.compute_timer.end()
            self._warn_of_waits()
            requests = self._exchange.complete_step(step.rank_batch, self.metrics)
            if requests is None:
                continue
            begun = time.thread_time()
            parts.strategy.sync_buffers()
            if requests.stop and not state.finished:
                self._save_and_exit()
            if self._validator.due() and not self._validator.run():
                self._save_and_exit()
            saves = requests.save or self._checkpoints.due()
            if saves or state.validated_step == state.step or parts.log.is_logged(state.step):
                self._log_step()
            if saves:
                with activity.in_phase(RankPhase.SAVE):
                    self._checkpoints.save()
            if saves or state.validated_step == state.step:
                begun = time.thread_time()  # the work so far is not part of a copy
            if self._checkpoints.copies.due():
                self._checkpoints.copies.copy(begun)
            if state.finished:
                break
            self._exchange.begin()

    def _warn_of_waits(self) -> None:
        if not self._has_warned:
            num_workers = self._parts.source.loading.num_workers
            hint = warn_too_few_workers(
                *self._parts.step_timer.data_wait(), num_workers, self._cpus, can_request=can_request_cpus()
            )
            self._has_warned = hint is not None
            self._print_hint(hint)

    def _roll_back(self, bad: BadStep) -> None:
        """Return to the newest finite checkpoint; the bad step will be excluded."""
        parts, guard = self._parts, self.state.loss_guard
        newest = self._checkpoints.finish_pending()
        reason = None
        if guard.policy == "stop":
            reason = "on_bad_loss is 'stop'"
        elif not guard.exclude_step(bad.step):
            reason = f"{MAX_CONSECUTIVE} consecutive steps were bad (on_bad_loss={guard.policy!r})"
        elif newest is None:
            reason = "there is no checkpoint to return to (on_bad_loss='rollback')"
        action = "stop" if reason else "rollback"
        parts.log.write_event("bad_loss", step=bad.step, cause=bad.cause, action=action)
        if reason:
            raise self._bad_loss(bad, reason, newest)
        parts.progress.print_message(
            f"hpctrain: {bad.cause}, so training returns to {newest} and excludes the batch of this step"
        )
        self._exchange.discard()
        parts.source.close()
        parts.strategy.sync_buffers()  # ends what an algorithm does in the background
        with activity.in_phase(RankPhase.LOAD):
            self._checkpoints.resume()
        if not self.state.is_position_restored:  # the samples of the bad step would return in a later step
            reason = (
                "train_dataset has no state_dict() or load_state_dict(), so training cannot return to an "
                "earlier sample (on_bad_loss='rollback')"
            )
            raise self._bad_loss(bad, reason, newest)
        for remark in self.state.remarks:
            self._print_hint(remark)
        if parts.replica_check is not None:
            parts.replica_check.reset()
        parts.source.begin(self.state.step)
        self.state.finished = False

    def _bad_loss(self, bad: BadStep, reason: str, newest: str | None) -> BadLoss:
        can_skip = not self._parts.settings.elastic_determinism
        return bad_loss(bad.cause, reason, newest, self.state.loss_guard.policy, can_skip=can_skip)

    def _resume(self, *, advances_schedules: bool) -> None:
        parts, state = self._parts, self.state
        activity.set_phase(RankPhase.LOAD)
        self._checkpoints.resume()
        self._validator.limit_batches(self.train_step.micro_batch_size(state))
        remedy = _TRAINER_REMEDY if advances_schedules else _SESSION_REMEDY
        ignored = [f"{value} {remedy}" for value in state.ignored]
        # A session's script advances its schedules, in most cases once per step.
        schedulers = [
            scheduler
            for scheduler in state.schedulers
            if advances_schedules or 0 < state.step == getattr(inner_scheduler(scheduler), "last_epoch", None)
        ]
        if parts.source.last_step is not None and not is_manual(parts.module):
            steps_per_epoch = parts.source.steps_per_epoch
            periods = [s.period(steps_per_epoch) if hasattr(s, "period") else 1 for s in schedulers]
            schedules = zip(map(inner_scheduler, schedulers), periods, strict=True)
            ignored += check_ends(schedules, parts.source.last_step, state.ignored)
        for remark in (*parts.source.remarks, *parts.strategy.remarks, *ignored, *state.remarks):
            self._print_hint(remark)
        parts.log.write_ignored(state.ignored)
        self._loggers.start(state.ignored)
        parts.source.begin(state.step)
        state.finished = parts.source.finished
        if parts.replica_check is not None:
            parts.replica_check.reset()
        # Parts frozen in evaluation mode, such as a norm layer, remain unchanged.
        if not parts.module.training:
            parts.module.train()
        if state.step == 0:
            self._validator.check_sanity()
        parts.callbacks.fit_start(state.step)
        parts.end_if_requested()
        if self._validator.due():  # a stop was requested before or during this validation
            if not self._validator.run():
                self._checkpoints.save_and_exit()
            self._log_step()
            self._checkpoints.add_score()
        if state.finished:
            parts.progress.print_message(f"training is already complete: step {state.step} was the last step")
        else:
            parts.source.micro_batch_size = self.train_step.micro_batch_size(state, parts.source)
            self._validator.limit_batches(parts.source.micro_batch_size)
            if (limit := self.train_step.max_micro_batch) is not None:
                self._print_hint(
                    f"Micro-batches are limited to {pluralize(limit, 'sample')}, because an earlier "
                    "attempt ran out of GPU memory. The gradients are the same except for rounding."
                )

    def _save_and_exit(self) -> NoReturn:
        self._log_step()
        activity.set_phase(RankPhase.SAVE)
        self._checkpoints.save_and_exit()

    def _log_step(self) -> None:
        parts, state = self._parts, self.state
        parts.progress.show(state.step, state.latest)
        ended = parts.step_timer.sample()
        parts.log.write_steps([StepResult(state.step, state.epoch, state.latest, ended)])

    def _print_hint(self, hint: str | None) -> None:
        if hint:
            self._parts.progress.print_message(f"hpctrain: {hint}")
