"""Loop of one `Trainer.fit` call, and the work that all ranks do at the same step."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any, NoReturn

import torch

from hpctrain.errors import UserError
from hpctrain.rundir import RunDir
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.stopping.stop_signals import StopFlag
from hpctrain.telemetry.loggers import find_loggers
from hpctrain.training.base import rng
from hpctrain.training.base.metric_accumulator import MetricAccumulator
from hpctrain.training.base.precision import cast_batch, cast_module, forward_context, make_scaler
from hpctrain.training.callbacks import CallbackList
from hpctrain.training.data.batch_plan import DataRank, RankBatch
from hpctrain.training.data.dataset_adapters import make_step_source, make_validation_set
from hpctrain.training.data.loader_config import make_loader_config, to_device
from hpctrain.training.data.step_source import StepData, StopCondition
from hpctrain.training.loop.step_sync import StepFlags, StepResult, StepSync
from hpctrain.training.loop.train_step import TrainStep
from hpctrain.training.loop.validation import run_validation
from hpctrain.training.module import Module, takes_optimizer_idx
from hpctrain.training.observe.compute_timer import ComputeTimer
from hpctrain.training.observe.dataloader_hints import (
    count_rank_cpus,
    warn_too_few_workers,
    warn_too_many_workers,
)
from hpctrain.training.observe.environment_info import collect_environment
from hpctrain.training.observe.logger_process import LoggerProcess
from hpctrain.training.observe.progress import format_scalars, make_progress
from hpctrain.training.observe.run_writer import RunWriter
from hpctrain.training.observe.step_timer import StepTimer
from hpctrain.training.optim.activation_checkpoint import activation_checkpointing
from hpctrain.training.optim.micro_batch_size import (
    find_micro_batch_size,
    fits_in_memory,
    preserve_state,
    snapshot_buffers,
)
from hpctrain.training.optim.optimizer_setup import check_trainable, configure_optimizers_of, parameters_of
from hpctrain.training.optim.torch_compile import compile_steps
from hpctrain.training.saving.training_checkpoints import TrainingCheckpoints
from hpctrain.training.saving.training_state import TrainingState
from hpctrain.training.strategies import Strategy, find_strategy
from hpctrain.training.trainer_config import TrainerConfig

_NONE = StepFlags()


class TrainingLoop:
    """Loop of one training, with its state and its helpers."""

    def __init__(
        self,
        *,
        settings: TrainerConfig,
        module: Module,
        team: DistributedContext,
        train_dataset: Any,
        val_dataset: Any,
        callbacks: CallbackList,
        run: RunDir | None,
        environ: Mapping[str, str],
        stop: StopFlag,
        strategy: type[Strategy] | None = None,
    ) -> None:
        """Prepare the data, and put the module on its device and into its strategy. All ranks must call this.

        Args:
            settings: the training's settings.
            module: the module to train.
            team: the ranks.
            train_dataset: training data.
            val_dataset: validation data, or None.
            callbacks: the callbacks.
            run: the run folder, or None.
            environ: environment variables.
            stop: this rank's stop flag.
            strategy: replaces the strategy named by the settings.

        Raises:
            UserError: a data set is empty, or is not usable.
        """
        self._settings, self._team, self._stop = settings, team, stop
        self._callbacks = callbacks
        loading = make_loader_config(settings, team)
        strategy = strategy or find_strategy(settings.strategy, environ)
        deal = self._deal = strategy.deal(team.ranks)
        self._feed = make_step_source(
            train_dataset,
            loading,
            deal,
            team,
            seed=settings.seed,
            global_batch_size=settings.global_batch_size,
            until=StopCondition(settings.max_steps, settings.max_epochs),
        )
        self._validation_set = (
            None
            if val_dataset is None
            else make_validation_set(
                val_dataset,
                loading,
                DataRank(team.ranks.rank, team.ranks.world_size),
                team,
                seed=settings.seed,
                global_batch_size=settings.global_batch_size,
            )
        )
        if settings.keep_best and val_dataset is None and settings.monitor.startswith("val_"):
            raise UserError(
                f"keep_best={settings.keep_best} needs monitor={settings.monitor!r}, which validation "
                "measures, but fit() received no validation set. Pass one, or set monitor to a metric that "
                "training_step returns, such as 'loss'."
            )
        callbacks.check(validates=val_dataset is not None and settings.validate_every is not None)
        self._module = module
        cast_module(module, settings.precision)
        self._strategy = strategy(module, team, settings)
        optimization = configure_optimizers_of(module)
        if not self._strategy.splits_itself:
            check_trainable(module, optimization)
        if takes_optimizer_idx(module):
            self._strategy.take_turns([parameters_of(each) for each in optimization.optimizers])
        optimization = self._strategy.optimized(optimization)
        scaler = make_scaler(settings.precision, team.device)
        self.state = TrainingState(module, optimization, self._feed)
        self.state.scaler, self.state.callbacks = scaler, callbacks
        self.state.algorithm = self._strategy.algorithm
        self._stepping = TrainStep(self._strategy, optimization, settings, scaler)
        self.sums = MetricAccumulator()
        self._reports = StepSync(team, one_by_one=self._feed.has_news or callbacks.hear_steps)
        self._spent = StepTimer(team.device, team.ranks.world_size)
        self._clock = ComputeTimer(module, self.state.optimizers[0], team)
        self._cpus = count_rank_cpus(team.ranks.local_world_size)
        self._progress = make_progress(self._feed.last_step, team.ranks.is_main, settings.global_batch_size)
        self._log = (
            None
            if run is None
            else RunWriter(
                run,
                team,
                environ,
                log_every=settings.log_every,
                record_samples=settings.record_samples,
                say=self._progress.say,
                spent=self._spent,
                last_step=self._feed.last_step,
            )
        )
        surroundings = (
            collect_environment(settings, team, self._strategy.gradient_parts()) if team.ranks.is_main else {}
        )
        if self._log is not None:
            self._log.surroundings(surroundings)
        loggers = find_loggers(settings.loggers) if team.ranks.is_main else []
        self._tracking = LoggerProcess(loggers, run, surroundings, self._progress.say)
        self._checkpoints = TrainingCheckpoints(
            self.state,
            settings=settings,
            team=team,
            run=run,
            log=self._log,
            progress=self._progress,
            environ=environ,
            stop=stop,
        )

    @property
    def last_step(self) -> int | None:
        """Last step of the training; None if unknown."""
        return self._feed.last_step

    def run(self) -> None:
        """Resume, and train to the last step or to an agreed stop.

        Raises:
            SystemExit: with code 75, after a stop.
        """
        with closing(self.steps()) as steps:
            for step in steps:
                self._train(step)

    def steps(self) -> Generator[StepData, None, None]:
        """Resume, and yield each step; the caller trains it and adds to `sums`.

        The ranks' joint work runs between the steps. Close the generator if not all steps are taken.

        Raises:
            SystemExit: with code 75, after a stop.
        """
        rng.seed_all(rng.derive_seed(self._settings.seed, "rank", self._team.ranks.rank))
        with self._progress, self._tracking, self._checkpoints, self._changed_module(), closing(self._feed):
            self._begin()
            if not self.state.finished:
                yield from self._steps()
                if advice := warn_too_few_workers(
                    *self._spent.on_data(), self._settings.num_workers, self._cpus
                ):
                    self._progress.say(f"hpctrain: {advice}")
            self._team.barrier()
            self._callbacks.fit_end()
        activity.enter("end")
        if sentence := self._strategy.finish():
            self._progress.say(f"hpctrain: {sentence}")

    def _steps(self) -> Iterator[StepData]:
        """Yield the steps; a message sent after one step is read after the next."""
        state, reports = self.state, self._reports
        self._spent.now()
        reports.begin()
        for step in self._spent.waiting(self._feed.steps()):
            self._note_share(step.share)
            self.sums = MetricAccumulator()
            self._clock.begin()
            yield step
            self._clock.end()
            state.step, state.epoch = step.share.step, step.share.epoch
            wishes = self._show(*self._read()) if reports.are_under_way else _NONE
            state.finished = self._feed.finished or wishes.end
            if wishes.stop or wishes.save or self._is_boundary():
                reports.add(state.step, state.epoch, self.sums, None)
                self._tell()
                self._at_boundary(wishes)
                if state.finished:
                    break
                reports.begin()
            else:
                ended = None if self._log is None else self._log.ended(state.step)
                reports.add(state.step, state.epoch, self.sums, ended)
                if reports.are_due:
                    self._tell()

    @contextmanager
    def _changed_module(self) -> Iterator[None]:
        """Apply activation checkpointing and compilation to the module within the block."""
        settings = self._settings
        with (
            activation_checkpointing(self._module, settings.recompute),
            compile_steps(self._module, settings.compile),
        ):
            yield

    def _begin(self) -> None:
        """Load the newest checkpoint, if any, and prepare the next step."""
        state = self.state
        activity.enter("load")
        self._checkpoints.resume()
        for remark in (*self._feed.remarks, *self._strategy.remarks, *state.remarks):
            self._progress.say(f"hpctrain: {remark}")
        self._feed.begin(state.step)
        state.finished = self._feed.finished
        if not self._module.training:  # keep parts frozen in evaluation mode, such as a norm layer
            self._module.train()
        if state.step == 0:
            self._check_sanity()
        self._advise_on_workers()
        self._callbacks.fit_start()
        state.finished = state.finished or self._is_to_end()
        if self._validation_due():  # a stop came before or during this validation
            if not self._validate():
                self._checkpoints.leave()
            self._write()
            self._checkpoints.add_score()
        if state.finished:
            self._progress.say(f"already complete: step {state.step} was the last step")
        else:
            self._feed.micro_batch_size = self._find_micro_batch_size()

    def _train(self, step: StepData) -> None:
        """Train one optimizer step on this rank's share of the global batch."""
        one = step.num_micro_batches == 1
        micro_batches = step.micro_batches if one else self._spent.waiting(step.micro_batches)
        self._stepping.take(step, micro_batches, self.sums)

    def _note_share(self, share: RankBatch) -> None:
        # If all ranks train the same samples, only rank 0 records them.
        if self._log is not None and (self._deal.world_size > 1 or self._team.ranks.is_main):
            self._log.share(share)

    def _tell(self) -> None:
        """Send this rank's unsent steps and requests to the other ranks."""
        self._reports.send(
            StepFlags(
                stop=self._stop.is_set,
                save=self._checkpoints.wished(),
                end=self._callbacks.ending is not None,
                news=self._feed.news(),
            )
        )

    def _read(self) -> tuple[StepFlags, list[StepResult]]:
        with self._clock.exchange():
            wishes, results = self._reports.read()
        self._feed.hear(wishes.news)
        for result in results:
            self._callbacks.step_end(result.step, result.scalars)
        return wishes, results

    def _show(self, wishes: StepFlags, results: Sequence[StepResult]) -> StepFlags:
        """Show and log steps; return `wishes`."""
        if results:
            self._progress.show(results[-1].step, results[-1].scalars)
            if self._log is not None:
                self._log.steps(results)
        return wishes

    def _find_micro_batch_size(self) -> int | None:
        """Return the configured size; for "auto", the size from before a stop if it still fits, or search."""
        setting, state = self._settings.micro_batch_size, self.state
        if self._strategy.splits_itself and self._team.is_distributed:
            return None
        if setting != "auto":
            return setting
        share, batch_of = self._feed.trial()
        world_size = self._team.ranks.world_size

        def forward_backward(count: int) -> None:
            batch = to_device(batch_of(count), self._team.device)
            batch = cast_batch(batch, self._settings.precision)
            turn = self._strategy.turn_of(0) if takes_optimizer_idx(self._module) else nullcontext()
            with turn, forward_context(self._settings.precision, self._team.device):
                # No rank may wait here for one that runs out of memory.
                scalars = self._stepping.scalars(self._strategy.trial_step(batch))
            torch.autograd.backward(self._stepping.weighted(scalars["loss"], 1.0))

        if state.micro_batches is not None and state.micro_batches[0] == world_size:
            # Another size would change the order of additions.
            kept = state.micro_batches[1]
            with preserve_state(self._module):
                fits = fits_in_memory(
                    self._module, self._team.device, lambda: forward_backward(min(kept, share))
                )
            if self._team.lowest(float(fits)) > 0:
                return kept
        size = find_micro_batch_size(self._module, self._team, share, forward_backward)
        state.micro_batches = (world_size, size)
        return size

    def _is_boundary(self) -> bool:
        """True if all ranks must do joint work after this step that needs its result."""
        return self._checkpoints.due() or self._validation_due()

    def _at_boundary(self, before: StepFlags) -> None:
        """Leave after a stop request; otherwise validate and save, if due.

        Args:
            before: requests of the ranks, sent before the last step's results.
        """
        state = self.state
        now, (*earlier, latest) = self._read()
        self._show(now, earlier)
        state.latest = latest.scalars
        state.finished = state.finished or now.end
        self._strategy.align_buffers()
        if (before.stop or now.stop) and not state.finished:
            self._leave()
        if self._validation_due() and not self._validate():
            self._leave()
        self._write()
        if before.save or now.save or self._checkpoints.due():
            with activity.during("save"):
                self._checkpoints.save()

    def _leave(self) -> NoReturn:
        self._write()
        activity.enter("save")
        self._checkpoints.leave()

    def _validation_due(self) -> bool:
        """True if a validation is due; False if it already ran before the run was stopped at this step."""
        every, state = self._settings.validate_every, self.state
        if self._validation_set is None or every is None or state.step in (0, state.validated_step):
            return False
        return state.finished or (self._feed.at_epoch_end if every == "epoch" else state.step % every == 0)

    def _validate(self) -> bool:
        """Validate; return False if the ranks agreed to stop during it, with no state changed."""
        assert self._validation_set is not None
        state = self.state
        # Checkpoints do not keep a callback's request to end, so this validation must not be interrupted.
        stop = None if state.finished and not self._feed.finished else self._stop
        put_back = snapshot_buffers(self._module)
        with activity.during("validate"), self._spent.on("validation"):
            results = run_validation(
                self._strategy,
                self._validation_set,
                self._team,
                precision=self._settings.precision,
                stop=stop,
            )
        if results is None:
            put_back()
            return False
        # `loss` without prefix is the training loss.
        results = {f"val_{name}" if name in state.latest else name: mean for name, mean in results.items()}
        state.validation, state.validated_step = results, state.step
        state.latest = {**state.latest, **state.validation}
        self._progress.say(f"step {state.step}: {format_scalars(state.validation)}")
        self._callbacks.validation_end(state.step, state.validation)
        state.finished = state.finished or self._is_to_end()
        return True

    def _is_to_end(self) -> bool:
        """True if a callback of any rank requests the end of the training. All ranks must call this."""
        if not self._callbacks:
            return False
        ending = next(filter(None, self._team.gather(self._callbacks.ending)), None)
        if ending is not None:
            self._progress.say(f"training ends at step {self.state.step}: {ending}")
        return ending is not None

    def _check_sanity(self) -> None:
        """Validate a few batches, so that an error in validation shows at once."""
        if self._validation_set is None or self._settings.validate_every is None:
            return
        if num_batches := self._settings.sanity_val_batches:
            with preserve_state(self._module):
                results = run_validation(
                    self._strategy,
                    self._validation_set,
                    self._team,
                    precision=self._settings.precision,
                    num_batches=num_batches,
                )
            self._check_names(results or {})

    def _check_names(self, results: Mapping[str, float]) -> None:
        """Check that validation returns the metrics that callbacks and `keep_best` use.

        Raises:
            UserError: a metric is missing.
        """
        # A name that the training also has gets the prefix "val_"; so far only `loss` is known to be one.
        given = {"val_loss" if name == "loss" else name for name in results}
        accepted = {*given, *(f"val_{name}" for name in results)}
        self._callbacks.check_names(given, accepted)
        metric = self._settings.monitor
        if self._settings.keep_best and metric.startswith("val_") and metric not in accepted:
            raise UserError(
                f"keep_best={self._settings.keep_best} needs monitor={metric!r}, but validation returned "
                f"only: {', '.join(sorted(given))}."
            )

    def _advise_on_workers(self) -> None:
        advice = warn_too_many_workers(self._settings.num_workers, self._cpus)
        if advice and self._settings.num_workers:
            self._progress.say(f"hpctrain: {advice}")

    def _write(self) -> None:
        """Show and log the latest step, whatever its number."""
        state = self.state
        self._progress.show(state.step, state.latest)
        if self._log is not None:
            self._log.step(state.step, state.epoch, state.latest)
