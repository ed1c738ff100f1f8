"""Build the training loop, and run it: resume; train, exchange, validate and save in each step; stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, nullcontext
from copy import copy
from dataclasses import replace
from typing import Any, NoReturn

from torch.utils.data import DataLoader

from hpctrain.errors import UserError
from hpctrain.record_types import RankPhase
from hpctrain.rundir import MICRO_BATCH_VARIABLE, VERIFY_STEPS_VARIABLE, RunDir
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.resumed_values import check_ends, inner_scheduler
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.telemetry.hparams import collect_hparams
from hpctrain.telemetry.loggers import find_loggers
from hpctrain.text import pluralize
from hpctrain.training.base import rng
from hpctrain.training.base.metric_accumulator import MetricAccumulator
from hpctrain.training.base.tensors import cast_module, make_scaler
from hpctrain.training.callbacks import CallbackList
from hpctrain.training.components import Components
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.dataset_adapters import make_step_source, make_validation_set
from hpctrain.training.data.loader_config import make_loader_config
from hpctrain.training.data.step_source import StepData, StopCondition
from hpctrain.training.determinism.elastic_determinism import ElasticDeterminism
from hpctrain.training.loop.grain_train_step import GrainTrainStep
from hpctrain.training.loop.step_exchange import BadStep, StepExchange
from hpctrain.training.loop.train_step import TrainStep
from hpctrain.training.loop.validation import Validator
from hpctrain.training.module import Module, check_initialized, find_run, is_manual, takes_optimizer_idx
from hpctrain.training.observe.environment_info import (
    collect_environment,
    count_rank_cpus,
    hash_code,
    warn_too_few_workers,
)
from hpctrain.training.observe.logger_process import LoggerProcess
from hpctrain.training.observe.loss_guard import MAX_CONSECUTIVE, LossGuard, bad_loss
from hpctrain.training.observe.run_writer import Progress, RunWriter, StepResult
from hpctrain.training.observe.step_timers import ComputeTimer, StepTimer
from hpctrain.training.optim.module_transforms import activation_checkpointing, compile_steps
from hpctrain.training.optim.optimizer_setup import (
    OptimizerSetup,
    check_trainable,
    configure_optimizers_of,
    parameters_of,
)
from hpctrain.training.replica_check import ReplicaCheck
from hpctrain.training.saving.training_checkpoints import TrainingCheckpoints
from hpctrain.training.strategies import Strategy, find_strategy
from hpctrain.training.trainer_config import TrainerConfig
from hpctrain.training.training_state import TrainingState

_TRAINER_REMEDY = (
    "To change the value in a resumed run, set it in trainer.optimizers or trainer.schedulers, in the "
    "on_fit_start() of a callback, which runs after the checkpoint is loaded."
)
_SESSION_REMEDY = "To change the value in a resumed run, set it in the first iteration of the loop."


class TrainingLoop:
    def __init__(
        self,
        shared: Components,
        train_step: TrainStep,
        validator: Validator,
        loggers: LoggerProcess,
        checkpoints: TrainingCheckpoints,
    ) -> None:
        self._shared, self.train_step, self._validator = shared, train_step, validator
        self._loggers, self._checkpoints = loggers, checkpoints
        self._exchange = StepExchange(shared, validator, checkpoints)
        if shared.state.loss_guard.policy == "skip":
            train_step.loss_check = self._exchange
        self.state, self.last_step = shared.state, shared.source.last_step
        self.metrics = MetricAccumulator()
        self._cpus = count_rank_cpus(shared.context.ranks.local_world_size)
        self._has_warned = False

    def run(self) -> None:
        timer = self._shared.step_timer
        with closing(self.steps(advances_schedules=True)) as steps:
            for step in steps:
                micro_batches = step.micro_batches
                if step.num_micro_batches > 1:
                    micro_batches = timer.timed(micro_batches)
                self.train_step.run(step, micro_batches, self.metrics)

    def steps(self, *, advances_schedules: bool = False) -> Generator[StepData, None, None]:
        """Resume, and yield each step; the caller trains the step and adds to `metrics`."""
        shared, settings = self._shared, self._shared.settings
        rng.seed_all(rng.derive_seed(settings.seed, "rank", shared.context.ranks.rank))
        determinism = self.state.determinism
        with (
            nullcontext() if determinism is None else determinism.deterministic_algorithms(),
            self._loggers,
            self._checkpoints,
            activation_checkpointing(shared.module, settings.recompute),
            compile_steps(shared.module, settings.compile),
            closing(shared.source),
        ):
            self._resume(advances_schedules=advances_schedules)
            while not self.state.finished:
                try:
                    yield from self._steps()
                except BadStep as bad:
                    self._roll_back(bad)
            shared.context.barrier()
            shared.callbacks.call("on_fit_end", self.state.step)
        activity.set_phase(RankPhase.END)
        self._print_hint(shared.strategy.finish())

    def _steps(self) -> Iterator[StepData]:
        shared, state = self._shared, self.state
        shared.step_timer.sample()
        self._exchange.begin()
        steps = shared.source.steps()
        for step in shared.step_timer.timed(steps):
            self.metrics = MetricAccumulator()
            if step.rank_batch.step in state.loss_guard.excluded_steps:
                self.train_step.exclude_step(step, self.metrics)
            else:
                shared.log.write_samples(step.rank_batch)
                shared.compute_timer.begin()
                yield step
                shared.compute_timer.end()
            self._warn_of_waits()
            requests = self._exchange.complete_step(step.rank_batch, self.metrics)
            if requests is None:
                continue
            begun = time.thread_time()
            shared.strategy.sync_buffers()
            if requests.stop and not state.finished:
                self._save_and_exit()
            if self._validator.due() and not self._validator.run():
                self._save_and_exit()
            saves = requests.save or self._checkpoints.due()
            if saves or state.validated_step == state.step or shared.log.is_logged(state.step):
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
        if self._has_warned:
            return
        timer, num_workers = self._shared.step_timer, self._shared.source.loading.num_workers
        all_s = time.perf_counter() - timer.started_at
        hint = warn_too_few_workers(timer.waited_s, all_s, num_workers, self._cpus)
        self._has_warned = hint is not None
        self._print_hint(hint)

    def _roll_back(self, bad: BadStep) -> None:
        shared, guard = self._shared, self.state.loss_guard
        newest = self._checkpoints.finish_pending()
        reason = None
        if guard.policy == "stop":
            reason = "on_bad_loss is 'stop'"
        elif not guard.exclude_step(bad.step):
            reason = f"{MAX_CONSECUTIVE} consecutive steps were bad (on_bad_loss={guard.policy!r})"
        elif newest is None:
            reason = "there is no checkpoint to return to (on_bad_loss='rollback')"
        action = "stop" if reason else "rollback"
        shared.log.write_event("bad_loss", step=bad.step, cause=bad.cause, action=action)
        can_skip = not shared.settings.elastic_determinism
        if reason:
            raise bad_loss(bad.cause, reason, newest, guard.policy, can_skip=can_skip)
        shared.progress.print_message(
            f"hpctrain: {bad.cause}, so training returns to {newest} and excludes the batch of this step"
        )
        self._exchange.discard()
        shared.source.close()
        shared.strategy.sync_buffers()  # ends what an algorithm does in the background
        with activity.in_phase(RankPhase.LOAD):
            self._checkpoints.resume()
        if not self.state.is_position_restored:  # the samples of the bad step would return in a later step
            reason = (
                "train_dataset has no state_dict() or load_state_dict(), so training cannot return to an "
                "earlier sample (on_bad_loss='rollback')"
            )
            raise bad_loss(bad.cause, reason, newest, guard.policy, can_skip=can_skip)
        for message in self.state.remarks:
            self._print_hint(message)
        if shared.replica_check is not None:
            shared.replica_check.reset()
        shared.source.begin(self.state.step)
        self.state.finished = False

    def _check_schedules(self, *, is_advanced: bool) -> None:
        """Refuse or note schedules that end before training, unless a callback has changed them."""
        shared, state = self._shared, self.state
        if shared.source.last_step is None or is_manual(shared.module):
            return
        schedules = []
        for scheduler in state.schedulers:
            inner, find_period = inner_scheduler(scheduler), getattr(scheduler, "period", None)
            # A session's script advances its schedules, in most cases once per step.
            if is_advanced or 0 < state.step == getattr(inner, "last_epoch", None):
                schedules.append((inner, find_period(shared.source.steps_per_epoch) if find_period else 1))
        for message in check_ends(schedules, shared.source.last_step, state.ignored, can_change=is_advanced):
            self._print_hint(message)

    def _resume(self, *, advances_schedules: bool) -> None:
        shared, state = self._shared, self.state
        activity.set_phase(RankPhase.LOAD)
        self._checkpoints.resume()
        shared.source.micro_batch_size = limit = self.train_step.micro_batch_size
        self._validator.limit_batches(limit)
        remedy = _TRAINER_REMEDY if advances_schedules else _SESSION_REMEDY
        ignored = [f"{value} {remedy}" for value in state.ignored]
        for message in (*shared.source.remarks, *shared.strategy.remarks, *ignored, *state.remarks):
            self._print_hint(message)
        shared.log.write_ignored(state.ignored)
        self._loggers.start(state.ignored)
        shared.source.begin(state.step)
        state.finished = shared.source.finished
        if shared.replica_check is not None:
            shared.replica_check.reset()
        # Parts frozen in evaluation mode, such as a norm layer, remain unchanged.
        if not shared.module.training:
            shared.module.train()
        if state.step == 0:
            self._validator.check_sanity()
        shared.callbacks.call("on_fit_start", state.step)
        self._check_schedules(is_advanced=advances_schedules)
        shared.end_if_requested()
        if self._validator.due():  # a stop was requested before or during this validation
            if not self._validator.run():
                self._checkpoints.save_and_exit()
            self._log_step()
            self._checkpoints.add_score()
        if state.finished:
            shared.progress.print_message(
                f"training is already complete: step {state.step} was the last step"
            )
        elif (limit := self.train_step.max_micro_batch) is not None:
            self._print_hint(
                f"Micro-batches are limited to {pluralize(limit, 'sample')}, because an earlier attempt ran "
                "out of GPU memory. The gradients are the same except for rounding."
            )

    def _save_and_exit(self) -> NoReturn:
        self._log_step()
        self._checkpoints.save_and_exit()

    def _log_step(self) -> None:
        shared, state = self._shared, self.state
        shared.progress.show(state.step, state.latest)
        ended = shared.step_timer.sample()
        shared.log.write_steps([StepResult(state.step, state.epoch, state.latest, ended)])

    def _print_hint(self, hint: str | None) -> None:
        if hint:
            self._shared.progress.print_message(f"hpctrain: {hint}")


def build_training_loop(
    settings: TrainerConfig,
    module: Module,
    context: DistributedContext,
    data: tuple[Any, Any],
    callbacks: CallbackList,
    run: RunDir | None,
    environ: Mapping[str, str],
    stop: StopFlag,
    strategy: type[Strategy] | None = None,
) -> TrainingLoop:
    """Collective. Return a loop over the training set in `data`, with validations if there is another set."""
    check_initialized(module)
    ranks, (train_dataset, val_dataset) = context.ranks, data
    has_grain_size = settings.given.keys() & {"grain_size", "micro_batch_size", "global_batch_size"}
    if settings.elastic_determinism and isinstance(train_dataset, DataLoader) and not has_grain_size:
        raise UserError(
            "elastic_determinism is True, and train_dataset is a DataLoader, so the size of the grains is "
            "unknown. Set grain_size, for example to a divisor of the DataLoader's batch_size."
        )
    strategy_class = strategy or find_strategy(settings.strategy, environ)
    data_rank = replace(strategy_class.data_rank(ranks), grain_size=settings.grain_size)
    loading = make_loader_config(settings, context)
    until = StopCondition(settings.max_steps, settings.max_epochs)
    source = make_step_source(train_dataset, loading, data_rank, context, until, settings.strategy)
    val_data = None
    if val_dataset is not None:
        val_rank = DataRank(ranks.rank, ranks.world_size, settings.grain_size)
        val_data = make_validation_set(val_dataset, loading, val_rank, context)
    settings = copy(settings)
    settings.global_batch_size = source.loading.global_batch_size
    if settings.accumulate_grad_batches > 1 and settings.micro_batch_size is None:
        num_passes = settings.accumulate_grad_batches * data_rank.world_size
        settings.micro_batch_size = -(-settings.global_batch_size // num_passes)
    if settings.keep_best and val_data is None and settings.monitor.startswith("val_"):
        raise UserError(
            f"keep_best={settings.keep_best} selects checkpoints by monitor={settings.monitor!r}, but "
            "this run has no validation set. Pass a validation set, or set monitor to a metric that "
            "training_step returns, such as 'loss'."
        )
    if run is None and settings.on_bad_loss == "rollback":
        raise UserError(
            "on_bad_loss is 'rollback', but there is no run folder, so there would be no checkpoint for a "
            "rollback. Set run_dir, or use on_bad_loss='skip'."
        )
    callbacks.check(validates=val_data is not None and settings.validate_every is not None)
    cast_module(module, settings.precision)
    placed = strategy_class(module, context, settings)
    module_run = find_run(module)
    if module_run is not None:
        module_run.source = source
    optimization = _configure_optimizers(placed, module)
    has_shards = context.is_distributed and not placed.has_complete_state
    scaler = make_scaler(settings.precision, context.device, has_shards=has_shards)
    determinism = ElasticDeterminism(context, settings.grain_size) if settings.grain_size else None
    train_step: TrainStep
    if determinism is not None:
        train_step = GrainTrainStep(determinism, placed, optimization, scaler)
    elif module_run is not None and module_run.step_class is not None:
        train_step = module_run.step_class(placed, optimization, scaler)
    else:
        train_step = TrainStep(placed, optimization, scaler)
        train_step.max_micro_batch = int(environ.get(MICRO_BATCH_VARIABLE) or 0) or None
    guard = LossGuard(settings, has_scaler=scaler is not None)
    state = TrainingState(module, optimization, source, guard)
    if module_run is not None:
        module_run.state = state
        module_run.proxy.optimizers = module_run.proxy.optimizers or [*state.optimizers]
    state.determinism = determinism
    state.scaler, state.callbacks, state.algorithm = scaler, callbacks, placed.algorithm
    progress = Progress(source.last_step, settings.global_batch_size, is_main=ranks.is_main)
    replica_check, notice = ReplicaCheck.for_training(context, state, placed, settings.replica_check_every)
    if determinism is not None and determinism.hardware_differs:
        notice = (
            "The ranks compute on different hardware, which may round differently, so the result depends on "
            "the assignment of grains to ranks, and gradients are not compared."
        )
    elif isinstance(train_step, GrainTrainStep) and settings.witness_every and context.is_distributed:
        train_step.add_witness(settings.witness_every, source, state)
    if notice is not None:
        progress.print_message(f"hpctrain: {notice}")
    shared = Components(
        settings=settings,
        context=context,
        stop=stop,
        module=module,
        strategy=placed,
        source=source,
        state=state,
        callbacks=callbacks,
        progress=progress,
        step_timer=StepTimer(context.device, ranks.world_size),
        compute_timer=ComputeTimer(module, state.optimizers[0], context),
        log=RunWriter(
            run,
            context,
            environ,
            progress.print_message,
            log_every=1 if VERIFY_STEPS_VARIABLE in environ else settings.log_every,
            # If all ranks train the same samples, only rank 0 records them.
            record_samples=settings.record_samples and (data_rank.world_size > 1 or ranks.is_main),
            last_step=source.last_step,
        ),
        replica_check=replica_check,
    )
    return TrainingLoop(
        shared,
        train_step,
        Validator(shared, val_data),
        _make_loggers(shared, environ),
        TrainingCheckpoints(shared, environ),
    )


def _configure_optimizers(strategy: Strategy, module: Module) -> OptimizerSetup:
    optimization = configure_optimizers_of(module)
    if not strategy.splits_batches:
        check_trainable(module, optimization)
    if takes_optimizer_idx(module):
        strategy.setup_optimizer_toggling([*map(parameters_of, optimization.optimizers)])
    return strategy.wrap_optimizers(optimization)


def _make_loggers(shared: Components, environ: Mapping[str, str]) -> LoggerProcess:
    if not shared.context.ranks.is_main:
        return LoggerProcess([], None, {}, shared.progress.print_message)
    environment = collect_environment(shared.settings, shared.context, shared.strategy.gradient_parts())
    # A LightningModule has the values of `save_hyperparameters()`.
    hparams = getattr(shared.module, "hparams", None)
    environment["hparams"] = collect_hparams(
        hparams if isinstance(hparams, Mapping) else None, shared.settings.hparams, args=sys.argv[1:]
    )
    shared.log.write_environment({**environment, "code": hash_code(environ)})
    # A verification is not a run of its own for the user's trackers.
    loggers = [] if VERIFY_STEPS_VARIABLE in environ else find_loggers(shared.settings.loggers)
    return LoggerProcess(loggers, shared.log.run, environment, shared.progress.print_message)
