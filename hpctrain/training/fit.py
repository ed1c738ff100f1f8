"""One call of `Trainer.fit`: the loop, and what all ranks must do at the same step of it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import torch

from hpctrain.errors import UserError
from hpctrain.rundir import RunDir
from hpctrain.runtime.process_group import Team
from hpctrain.runtime.signals import StopFlag
from hpctrain.telemetry.loggers import find_loggers
from hpctrain.training import rng
from hpctrain.training.checkpointing import Checkpointing
from hpctrain.training.data.feed import MicroBatch, Step, Until
from hpctrain.training.data.loading import Loading, to_device
from hpctrain.training.data.plan import Deal, Share
from hpctrain.training.data.sources import make_feed, make_validation_set
from hpctrain.training.micro_batches import (
    find_micro_batch_size,
    fits_here,
    left_as_it_was,
    out_of_memory_advice,
)
from hpctrain.training.module import Module, as_scalars
from hpctrain.training.optimization import configured
from hpctrain.training.precision import batch_in_precision, forward_context, in_precision, make_scaler
from hpctrain.training.progress import format_scalars, make_progress
from hpctrain.training.report import ScalarSums, StepReport, StepResult
from hpctrain.training.run_log import RunLog
from hpctrain.training.settings import Settings
from hpctrain.training.spent import Spent
from hpctrain.training.state import TrainingState
from hpctrain.training.strategies import find_strategy
from hpctrain.training.surroundings import describe
from hpctrain.training.tracking import Tracking
from hpctrain.training.validation import validate


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
        run: RunDir | None,
        environ: Mapping[str, str],
        stop: StopFlag,
    ) -> None:
        """Look at the data, put the module on its device and into its strategy. All ranks must call this.

        Raises:
            UserError: a data set is empty, or cannot be one.
        """
        self._settings, self._team, self._stop = settings, team, stop
        loading = Loading(
            num_workers=settings.num_workers,
            collate_fn=settings.collate_fn,
            pin_memory=team.device.type == "cuda",
            prefetch_factor=settings.prefetch_factor,
            timeout_s=settings.data_timeout_s,
            seed_samples=settings.seed_samples,
        )
        strategy = find_strategy(settings.strategy, environ)
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
        self._module = module
        in_precision(module, settings.precision)
        self._strategy = strategy(module, team, settings)
        self.state = TrainingState(module, self._strategy.optimized(configured(module)), self._feed)
        self._scaler = self.state.scaler = make_scaler(settings.precision, team.device)
        self._spent = Spent(team.device)
        self._progress = make_progress(self._feed.last_step, team.ranks.is_main)
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
        surroundings = describe(settings, team) if team.ranks.is_main else {}
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
        rng.seed_all(rng.derived_seed(self._settings.seed, "rank", self._team.ranks.rank))
        with self._progress, self._tracking, self._checkpoints, closing(self._feed):
            self._begin()
            self._spent.take()
            report: StepReport | None = None
            for step in self._spent.waiting(self._feed.steps()):
                sums = self._train(step)
                stop = save = False
                if report is not None:
                    result = self._read(report)
                    stop, save = result.stop, result.save
                self.state.finished = self._feed.finished
                report = self._report(step.share, sums)
                if stop or save or self._is_boundary():
                    self._at_boundary(self._read(report, show=False), stop, save)
                    report = None
            self._team.barrier()
        if sentence := self._strategy.finish():
            self._progress.say(f"hpctrain: {sentence}")

    def _begin(self) -> None:
        """Load what there is to load, and make ready for the step after it."""
        state = self.state
        self._checkpoints.resume()
        for remark in (*self._strategy.remarks, *state.remarks):
            self._progress.say(f"hpctrain: {remark}")
        self._feed.begin(state.step)
        state.finished = self._feed.finished
        self._module.train()
        if self._validate_if_due():  # A stop came before it.
            self._write(state.step, state.epoch, state.latest, always=True)
            self._checkpoints.add_score()
        if state.finished:
            self._progress.say(f"nothing left to train: step {state.step} is done, the last one")
        else:
            self._feed.micro_batch_size = self._find_micro_batch_size()

    def _train(self, step: Step) -> ScalarSums:
        """One optimizer step on this rank's share of the global batch."""
        share, state = step.share, self.state
        # Where all ranks train the same samples, they are told once.
        if self._log is not None and (self._deal.world_size > 1 or self._team.ranks.is_main):
            self._log.share(share)
        sums = ScalarSums()
        for number, micro_batch in enumerate(self._spent.waiting(step.micro_batches), 1):
            # Ranks exchange gradients once a step, after the last micro-batch.
            last = number == step.num_micro_batches
            with contextlib.nullcontext() if last else self._strategy.accumulating():
                try:
                    self._forward_backward(share, micro_batch, sums)
                except torch.OutOfMemoryError as error:
                    num_samples = max(micro_batch.num_samples, 1)
                    out_of_memory_advice(error, self._settings.micro_batch_size, num_samples)
                    raise
        self._update()
        state.step, state.epoch = share.step, share.epoch
        return sums

    def _forward_backward(self, share: Share, micro_batch: MicroBatch, sums: ScalarSums) -> None:
        """Add the gradient of a micro-batch, at its weight in the global batch."""
        team = self._team
        batch = batch_in_precision(to_device(micro_batch.batch, team.device), self._settings.precision)
        with forward_context(self._settings.precision, team.device):
            output, num_samples = self._strategy.training_step(
                batch, share.batch_idx, micro_batch.num_samples
            )
        scalars = self._scalars(output)
        # The strategy takes the mean over those that share the batch; it is to be the mean over the batch.
        part = num_samples / share.batch_size
        self._strategy.backward(self._weighted(scalars["loss"], part * self._deal.world_size))
        sums.add(scalars, part)

    def _scalars(self, output: Any) -> dict[str, torch.Tensor]:
        """What a training step returned, checked."""
        scalars = as_scalars(output, "loss", f"{type(self._module).__name__}.training_step")
        if "loss" not in scalars:
            raise UserError(
                f"{type(self._module).__name__}.training_step returned {sorted(scalars)}; "
                "'loss' is missing among them."
            )
        return scalars

    def _weighted(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        weighted = loss if weight == 1.0 else loss * weight
        return weighted if self._scaler is None else self._scaler.scale(weighted)

    def _update(self) -> None:
        """Let the optimizers and the schedules take their step."""
        state, scaler = self.state, self._scaler
        self._strategy.before_update()
        if scaler is None:
            for optimizer in state.optimizers:
                optimizer.step()
        else:
            for optimizer in state.optimizers:
                scaler.step(optimizer)
            scaler.update()
        # Schedules count steps, those included that float16 made the optimizers skip.
        with _without_remark_on_order() if scaler and not state.step else contextlib.nullcontext():
            for scheduler in state.schedulers:
                scheduler.step()
        for optimizer in state.optimizers:
            self._strategy.zero_grad(optimizer)

    def _report(self, share: Share, sums: ScalarSums) -> StepReport:
        return StepReport(
            self._team,
            share.step,
            share.epoch,
            sums.values,
            stop=self._stop.is_set,
            save=self._checkpoints.wished(),
            news=self._feed.news(),
        )

    def _read(self, report: StepReport, *, show: bool = True) -> StepResult:
        result = report.read()
        self._feed.hear(result.news)
        if show:
            self._write(result.step, result.epoch, result.scalars)
        return result

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
            with forward_context(self._settings.precision, self._team.device):
                # No rank may wait here for one that runs out of memory.
                scalars = self._scalars(self._strategy.trial_step(batch))
            torch.autograd.backward(self._weighted(scalars["loss"], 1.0))

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

    def _at_boundary(self, result: StepResult, stop: bool, save: bool) -> None:
        """Validate, save or leave, in that order of what is lost least if the job ends meanwhile."""
        state = self.state
        state.latest = result.scalars
        self._strategy.align_buffers()
        if (stop or result.stop) and not state.finished:
            self._write(state.step, state.epoch, state.latest, always=True)
            self._checkpoints.leave()
        self._validate_if_due()
        self._write(state.step, state.epoch, state.latest, always=True)
        if save or result.save or self._checkpoints.due():
            self._checkpoints.save()

    def _validation_due(self) -> bool:
        every, state = self._settings.validate_every, self.state
        if self._validation_set is None or every is None or state.step == 0:
            return False
        return state.finished or (self._feed.at_epoch_end if every == "epoch" else state.step % every == 0)

    def _validate_if_due(self) -> bool:
        """Validate, unless nothing is due or it was done before the run was interrupted at this very step."""
        state = self.state
        if self._validation_set is None or not self._validation_due() or state.validated_step == state.step:
            return False
        with self._spent.on("validation"):
            state.validation = validate(
                self._strategy, self._validation_set, self._team, precision=self._settings.precision
            )
        state.validated_step = state.step
        state.latest = {**state.latest, **state.validation}
        self._progress.say(f"step {state.step}: {format_scalars(state.validation)}")
        return True

    def _write(self, step: int, epoch: int, scalars: Mapping[str, float], *, always: bool = False) -> None:
        """Show a step, and log it if its number says so or it is `always` to be logged."""
        self._progress.show(step, scalars)
        if self._log is not None:
            self._log.scalars(step, epoch, scalars, always=always)


@contextlib.contextmanager
def _without_remark_on_order() -> Iterator[None]:
    """PyTorch remarks that a schedule steps before its optimizer, which float16 made skip its first step."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.* before .*optimizer.step")
        yield
