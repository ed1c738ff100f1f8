"""One call of `Trainer.fit`: the loop, and what all ranks must do at the same step of it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import Any, NoReturn

import torch

from hpctrain.errors import UserError
from hpctrain.rundir import RunDir
from hpctrain.runtime.process_group import Team
from hpctrain.runtime.pulse import pulse
from hpctrain.runtime.signals import StopFlag
from hpctrain.telemetry.loggers import find_loggers
from hpctrain.training import rng
from hpctrain.training.advice import cpus_of_rank, too_few_workers, too_many_workers
from hpctrain.training.callbacks import Callbacks
from hpctrain.training.checkpointing import Checkpointing
from hpctrain.training.compilation import compiled
from hpctrain.training.data.feed import Step, Until
from hpctrain.training.data.loading import loading_of, to_device
from hpctrain.training.data.plan import Deal, Share
from hpctrain.training.data.sources import make_feed, make_validation_set
from hpctrain.training.micro_batches import (
    find_micro_batch_size,
    fits_here,
    left_as_it_was,
    remembered,
)
from hpctrain.training.module import Module, takes_optimizer_idx
from hpctrain.training.optimization import check_trains, configured, parameters_of
from hpctrain.training.precision import batch_in_precision, forward_context, in_precision, make_scaler
from hpctrain.training.progress import format_scalars, make_progress
from hpctrain.training.recompute import recomputing
from hpctrain.training.report import Reports, StepResult, Wishes
from hpctrain.training.run_log import RunLog
from hpctrain.training.settings import Settings
from hpctrain.training.spent import Spent
from hpctrain.training.state import TrainingState
from hpctrain.training.step_clock import StepClock
from hpctrain.training.stepping import Stepping
from hpctrain.training.strategies import Strategy, find_strategy
from hpctrain.training.sums import ScalarSums
from hpctrain.training.surroundings import describe
from hpctrain.training.tracking import Tracking
from hpctrain.training.validation import validate

_NONE = Wishes()


class Fit:
    """The state of one training: what a checkpoint holds, and what the loop needs besides."""

    def __init__(
        self,
        *,
        settings: Settings,
        module: Module,
        team: Team,
        train_dataset: Any,
        val_dataset: Any,
        callbacks: Callbacks,
        run: RunDir | None,
        environ: Mapping[str, str],
        stop: StopFlag,
        strategy: type[Strategy] | None = None,
    ) -> None:
        """Look at the data, put the module on its device and into its strategy. All ranks must call this.

        Args:
            settings: what to do.
            module: what to train.
            team: the ranks.
            train_dataset: what to train on.
            val_dataset: what to validate on, or None.
            callbacks: what is called at certain moments.
            run: where to write, or None.
            environ: the environment.
            stop: tells whether this rank was told to stop.
            strategy: in place of the one that the settings name.

        Raises:
            UserError: a data set is empty, or cannot be one.
        """
        self._settings, self._team, self._stop = settings, team, stop
        self._callbacks = callbacks
        loading = loading_of(settings, team)
        strategy = strategy or find_strategy(settings.strategy, environ)
        deal = self._deal = strategy.deal(team.ranks)
        self._feed = make_feed(
            train_dataset,
            loading,
            deal,
            team,
            seed=settings.seed,
            global_batch_size=settings.global_batch_size,
            until=Until(settings.max_steps, settings.max_epochs),
        )
        self._validation_set = (
            None
            if val_dataset is None
            else make_validation_set(
                val_dataset,
                loading,
                Deal(team.ranks.rank, team.ranks.world_size),
                team,
                seed=settings.seed,
                global_batch_size=settings.global_batch_size,
            )
        )
        if settings.keep_best and val_dataset is None and settings.best_metric.startswith("val_"):
            raise UserError(
                f"keep_best is {settings.keep_best} and goes by best_metric={settings.best_metric!r}, which "
                "a validation measures, but fit() was given no validation set. Give one, or a best_metric "
                "that training_step returns, such as 'loss'."
            )
        callbacks.check(validates=val_dataset is not None and settings.validate_every is not None)
        self._module = module
        in_precision(module, settings.precision)
        self._strategy = strategy(module, team, settings)
        optimization = configured(module)
        if not self._strategy.splits_itself:
            check_trains(module, optimization)
        if takes_optimizer_idx(module):
            self._strategy.take_turns([parameters_of(each) for each in optimization.optimizers])
        optimization = self._strategy.optimized(optimization)
        scaler = make_scaler(settings.precision, team.device)
        self.state = TrainingState(module, optimization, self._feed)
        self.state.scaler, self.state.callbacks = scaler, callbacks
        self.state.algorithm = self._strategy.algorithm
        self._stepping = Stepping(self._strategy, optimization, settings, scaler)
        self.sums = ScalarSums()
        self._reports = Reports(team, one_by_one=self._feed.has_news or callbacks.hear_steps)
        self._spent = Spent(team.device, team.ranks.world_size)
        self._clock = StepClock(module, self.state.optimizers[0], team)
        self._cpus = cpus_of_rank(team.ranks.local_world_size)
        self._progress = make_progress(self._feed.last_step, team.ranks.is_main, settings.global_batch_size)
        self._log = (
            None
            if run is None
            else RunLog(
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
        surroundings = describe(settings, team, self._strategy.gradient_parts()) if team.ranks.is_main else {}
        if self._log is not None:
            self._log.surroundings(surroundings)
        loggers = find_loggers(settings.loggers) if team.ranks.is_main else []
        self._tracking = Tracking(loggers, run, surroundings, self._progress.say)
        self._checkpoints = Checkpointing(
            self.state,
            settings=settings,
            team=team,
            run=run,
            log=self._log,
            progress=self._progress,
            environ=environ,
            stop=stop,
        )

    def run(self) -> None:
        """Resume, train to the last step; or leave with code 75 where all ranks agreed to stop.

        Raises:
            SystemExit: with code 75, after a stop.
        """
        with closing(self.steps()) as steps:
            for step in steps:
                self._train(step)

    def steps(self) -> Generator[Step, None, None]:
        """Resume, and yield each step that is to be trained: whoever gets one trains it and adds to `sums`.

        In between is done what all ranks do together. Close it where not all steps are taken.

        Raises:
            SystemExit: with code 75, after a stop.
        """
        rng.seed_all(rng.derived_seed(self._settings.seed, "rank", self._team.ranks.rank))
        with self._progress, self._tracking, self._checkpoints, self._changed_module(), closing(self._feed):
            self._begin()
            if not self.state.finished:
                yield from self._steps()
                if advice := too_few_workers(*self._spent.on_data(), self._settings.num_workers, self._cpus):
                    self._progress.say(f"hpctrain: {advice}")
            self._team.barrier()
            self._callbacks.fit_end()
        pulse.enter("end")
        if sentence := self._strategy.finish():
            self._progress.say(f"hpctrain: {sentence}")

    def _steps(self) -> Iterator[Step]:
        """Yield step after step; what was told of some is read after the next one."""
        state, reports = self.state, self._reports
        self._spent.now()
        reports.begin()
        for step in self._spent.waiting(self._feed.steps()):
            self._note_share(step.share)
            self.sums = ScalarSums()
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
        """What is put around the module while it is trained, and taken off again."""
        settings = self._settings
        with recomputing(self._module, settings.recompute), compiled(self._module, settings.compile):
            yield

    def _begin(self) -> None:
        """Load what there is to load, and make ready for the step after it."""
        state = self.state
        pulse.enter("load")
        self._checkpoints.resume()
        for remark in (*self._feed.remarks, *self._strategy.remarks, *state.remarks):
            self._progress.say(f"hpctrain: {remark}")
        self._feed.begin(state.step)
        state.finished = self._feed.finished
        if not self._module.training:  # Parts that are not to be, such as a frozen norm, stay as they are.
            self._module.train()
        if state.step == 0:
            self._check_sanity()
        self._advise_on_workers()
        self._callbacks.fit_start()
        state.finished = state.finished or self._is_to_end()
        if self._validation_due():  # A stop came before it, or in it.
            if not self._validate():
                self._checkpoints.leave()
            self._write()
            self._checkpoints.add_score()
        if state.finished:
            self._progress.say(f"nothing left to train: step {state.step} is done, the last one")
        else:
            self._feed.micro_batch_size = self._find_micro_batch_size()

    def _train(self, step: Step) -> None:
        """One optimizer step on this rank's share of the global batch."""
        one = step.num_micro_batches == 1
        micro_batches = step.micro_batches if one else self._spent.waiting(step.micro_batches)
        self._stepping.take(step, micro_batches, self.sums)

    def _note_share(self, share: Share) -> None:
        # Where all ranks train the same samples, they are told once.
        if self._log is not None and (self._deal.world_size > 1 or self._team.ranks.is_main):
            self._log.share(share)

    def _tell(self) -> None:
        """Send what the other ranks do not know yet of this one's steps and wishes."""
        self._reports.send(
            Wishes(
                stop=self._stop.is_set,
                save=self._checkpoints.wished(),
                end=self._callbacks.ending is not None,
                news=self._feed.news(),
            )
        )

    def _read(self) -> tuple[Wishes, list[StepResult]]:
        with self._clock.exchange():
            wishes, results = self._reports.read()
        self._feed.hear(wishes.news)
        for result in results:
            self._callbacks.step_end(result.step, result.scalars)
        return wishes, results

    def _show(self, wishes: Wishes, results: Sequence[StepResult]) -> Wishes:
        """Show and log steps."""
        if results:
            self._progress.show(results[-1].step, results[-1].scalars)
            if self._log is not None:
                self._log.steps(results)
        return wishes

    def _find_micro_batch_size(self) -> int | None:
        """What was set; for "auto" what is kept from before a stop, if it still fits, or what is found."""
        setting, state = self._settings.micro_batch_size, self.state
        if self._strategy.splits_itself and self._team.is_distributed:
            return None
        if setting != "auto":
            return setting
        share, batch_of = self._feed.trial()
        world_size = self._team.ranks.world_size

        def forward_backward(count: int) -> None:
            batch = to_device(batch_of(count), self._team.device)
            batch = batch_in_precision(batch, self._settings.precision)
            turn = self._strategy.turn_of(0) if takes_optimizer_idx(self._module) else nullcontext()
            with turn, forward_context(self._settings.precision, self._team.device):
                # No rank may wait here for one that runs out of memory.
                scalars = self._stepping.scalars(self._strategy.trial_step(batch))
            torch.autograd.backward(self._stepping.weighted(scalars["loss"], 1.0))

        if state.micro_batches is not None and state.micro_batches[0] == world_size:
            # Another size would add the same numbers in another order.
            kept = state.micro_batches[1]
            with left_as_it_was(self._module):
                fits = fits_here(self._module, self._team.device, lambda: forward_backward(min(kept, share)))
            if self._team.lowest(float(fits)) > 0:
                return kept
        size = find_micro_batch_size(self._module, self._team, share, forward_backward)
        state.micro_batches = (world_size, size)
        return size

    def _is_boundary(self) -> bool:
        """Whether something is due after this step that needs its result, and that all ranks do together."""
        return self._checkpoints.due() or self._validation_due()

    def _at_boundary(self, before: Wishes) -> None:
        """Validate, save or leave, in that order of what is lost least if the job ends meanwhile.

        Args:
            before: what the ranks wanted before they told of the step that was trained last.
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
            with pulse.during("save"):
                self._checkpoints.save()

    def _leave(self) -> NoReturn:
        self._write()
        pulse.enter("save")
        self._checkpoints.leave()

    def _validation_due(self) -> bool:
        """Whether to validate now; not where that was done before the run was stopped at this very step."""
        every, state = self._settings.validate_every, self.state
        if self._validation_set is None or every is None or state.step in (0, state.validated_step):
            return False
        return state.finished or (self._feed.at_epoch_end if every == "epoch" else state.step % every == 0)

    def _validate(self) -> bool:
        """Validate; False where the ranks agreed to stop meanwhile, and nothing has changed."""
        assert self._validation_set is not None
        state = self.state
        # An end that a callback wanted is not kept in a checkpoint: it is carried out.
        stop = None if state.finished and not self._feed.finished else self._stop
        put_back = remembered(self._module)
        with pulse.during("validate"), self._spent.on("validation"):
            results = validate(
                self._strategy,
                self._validation_set,
                self._team,
                precision=self._settings.precision,
                stop=stop,
            )
        if results is None:
            put_back()
            return False
        # `loss` stands for that of training.
        results = {f"val_{name}" if name in state.latest else name: mean for name, mean in results.items()}
        state.validation, state.validated_step = results, state.step
        state.latest = {**state.latest, **state.validation}
        self._progress.say(f"step {state.step}: {format_scalars(state.validation)}")
        self._callbacks.validation_end(state.step, state.validation)
        state.finished = state.finished or self._is_to_end()
        return True

    def _is_to_end(self) -> bool:
        """Whether a callback of any rank wants the training to end here. All ranks must call this."""
        if not self._callbacks:
            return False
        ending = next(filter(None, self._team.gather(self._callbacks.ending)), None)
        if ending is not None:
            self._progress.say(f"the training ends at step {self.state.step}: {ending}")
        return ending is not None

    def _check_sanity(self) -> None:
        """Validate a few batches, so that a mistake in it does not show only after hours."""
        if self._validation_set is None or self._settings.validate_every is None:
            return
        if num_batches := self._settings.sanity_batches:
            with left_as_it_was(self._module):
                results = validate(
                    self._strategy,
                    self._validation_set,
                    self._team,
                    precision=self._settings.precision,
                    num_batches=num_batches,
                )
            self._check_names(results or {})

    def _check_names(self, results: Mapping[str, float]) -> None:
        """See that a validation measures what is gone by, before it is waited for.

        Raises:
            UserError: it does not.
        """
        # A name of the training's gets "val_" put before it, and which these are is not known yet.
        given = {*results, *(f"val_{name}" for name in results)}
        self._callbacks.check_names(given)
        metric = self._settings.best_metric
        if self._settings.keep_best and metric.startswith("val_") and metric not in given:
            raise UserError(
                f"keep_best is {self._settings.keep_best} and goes by best_metric={metric!r}, but the "
                f"validation gives {', '.join(map(repr, sorted(results)))}."
            )

    def _advise_on_workers(self) -> None:
        advice = too_many_workers(self._settings.num_workers, self._cpus)
        if advice and self._settings.num_workers:
            self._progress.say(f"hpctrain: {advice}")

    def _write(self) -> None:
        """Show the latest step and log it, whatever its number."""
        state = self.state
        self._progress.show(state.step, state.latest)
        if self._log is not None:
            self._log.step(state.step, state.epoch, state.latest)
