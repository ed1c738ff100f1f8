"""Build a training loop from the user's settings, module and data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from hpctrain.errors import UserError
from hpctrain.rundir import MICRO_BATCH_VARIABLE, VERIFY_STEPS_VARIABLE, RunDir
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.telemetry.hparams import collect_hparams
from hpctrain.telemetry.loggers import find_loggers
from hpctrain.training.base.precision import cast_module, make_scaler
from hpctrain.training.callbacks import CallbackList
from hpctrain.training.components import Components
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.dataset_adapters import make_step_source, make_validation_set
from hpctrain.training.data.loader_config import make_loader_config
from hpctrain.training.data.step_source import MapStepSource, StopCondition
from hpctrain.training.determinism.elastic_determinism import ElasticDeterminism
from hpctrain.training.determinism.witness import Witness, witness_distance
from hpctrain.training.loop.evaluation import Validator
from hpctrain.training.loop.grain_train_step import GrainTrainStep
from hpctrain.training.loop.lightning_step import LightningTrainStep
from hpctrain.training.loop.train_step import TrainStep
from hpctrain.training.loop.training_loop import TrainingLoop
from hpctrain.training.module import Module, check_initialized, find_run, takes_optimizer_idx
from hpctrain.training.observe.environment_info import collect_environment, hash_code
from hpctrain.training.observe.logger_process import LoggerProcess
from hpctrain.training.observe.loss_guard import LossGuard
from hpctrain.training.observe.progress import make_progress
from hpctrain.training.observe.run_writer import RunWriter
from hpctrain.training.observe.step_timers import ComputeTimer, StepTimer
from hpctrain.training.optim.optimizer_setup import (
    OptimizerSetup,
    check_trainable,
    configure_optimizers_of,
    parameters_of,
)
from hpctrain.training.replica_check import ReplicaCheck, own_suspect
from hpctrain.training.saving.training_checkpoints import TrainingCheckpoints
from hpctrain.training.strategies import Strategy, find_strategy
from hpctrain.training.trainer_config import TrainerConfig
from hpctrain.training.training_state import TrainingState


def build_training_loop(
    *,
    settings: TrainerConfig,
    module: Module,
    context: DistributedContext,
    train_dataset: Any,
    val_dataset: Any,
    callbacks: CallbackList,
    run: RunDir | None,
    environ: Mapping[str, str],
    stop: StopFlag,
    strategy: type[Strategy] | None = None,
) -> TrainingLoop:
    """Prepare the data, and set up the module on its device with its strategy."""
    check_initialized(module)
    ranks = context.ranks
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
    module_in_use = find_run(module)
    if module_in_use is not None:
        module_in_use.source = source
    optimization = _configure_optimizers(placed, module)
    has_shards = context.is_distributed and not placed.has_complete_state
    scaler = make_scaler(settings.precision, context.device, has_shards=has_shards)
    max_micro_batch = environ.get(MICRO_BATCH_VARIABLE)
    determinism = ElasticDeterminism(context, settings.grain_size) if settings.grain_size else None
    train_step: TrainStep
    if module_in_use is not None and module_in_use.has_hooks:
        train_step = LightningTrainStep(module_in_use, placed, optimization, settings, scaler)
    elif determinism is not None:
        train_step = GrainTrainStep(determinism, placed, optimization, settings, scaler)
    else:
        limit = int(max_micro_batch) if max_micro_batch else None
        train_step = TrainStep(placed, optimization, settings, scaler, limit)
    guard = LossGuard(settings, has_scaler=scaler is not None)
    state = TrainingState(module, optimization, source, guard)
    if module_in_use is not None:
        module_in_use.state = state
        module_in_use.proxy.optimizers = module_in_use.proxy.optimizers or [*state.optimizers]
    state.determinism = determinism
    state.scaler, state.callbacks, state.algorithm = scaler, callbacks, placed.algorithm
    progress = make_progress(source.last_step, ranks.is_main, settings.global_batch_size)
    replica_check, remark = ReplicaCheck.for_training(context, state, placed, settings.replica_check_every)
    if determinism is not None and determinism.hardware_differs:
        remark = (
            "The ranks compute on different hardware, which may round differently, so the result depends on "
            "the assignment of grains to ranks, and gradients are not compared."
        )
    elif isinstance(train_step, GrainTrainStep) and settings.witness_every and context.is_distributed:
        assert isinstance(source, MapStepSource)
        assert settings.grain_size is not None
        if source.loading.num_workers and source.loading.worker_init_fn is not None:
            raise UserError(
                "witness_every recomputes grains in the main process, without the DataLoader's "
                "worker_init_fn. Remove witness_every or worker_init_fn, or set num_workers=0."
            )
        witness = Witness(
            context,
            settings.witness_every,
            settings.grain_size,
            settings.seed,
            own_suspect(context),
            witness_distance(context),
        )
        train_step.add_witness(witness, source, state)
    if remark is not None:
        progress.print_message(f"hpctrain: {remark}")
    parts = Components(
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
        parts,
        train_step,
        Validator(parts, val_data),
        _make_loggers(parts, environ),
        TrainingCheckpoints(parts, environ),
    )


def _configure_optimizers(strategy: Strategy, module: Module) -> OptimizerSetup:
    optimization = configure_optimizers_of(module)
    if not strategy.splits_batches:
        check_trainable(module, optimization)
    if takes_optimizer_idx(module):
        strategy.setup_optimizer_toggling([*map(parameters_of, optimization.optimizers)])
    return strategy.wrap_optimizers(optimization)


def _make_loggers(parts: Components, environ: Mapping[str, str]) -> LoggerProcess:
    if not parts.context.ranks.is_main:
        return LoggerProcess([], None, {}, parts.progress.print_message)
    environment = collect_environment(parts.settings, parts.context, parts.strategy.gradient_parts())
    # A LightningModule has the values of `save_hyperparameters()`.
    hparams = getattr(parts.module, "hparams", None)
    environment["hparams"] = collect_hparams(
        hparams if isinstance(hparams, Mapping) else None, parts.settings.hparams, args=sys.argv[1:]
    )
    parts.log.write_environment({**environment, "code": hash_code(environ)})
    # A verification is not a run of its own for the user's trackers.
    loggers = [] if VERIFY_STEPS_VARIABLE in environ else find_loggers(parts.settings.loggers)
    return LoggerProcess(loggers, parts.log.run, environment, parts.progress.print_message)
