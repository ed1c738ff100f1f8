"""One call of `Trainer.fit`: the loop, and what all ranks must do at the same step of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hpctrain.errors import UserError
from hpctrain.rundir import RunDir
from hpctrain.runtime.process_group import Team
from hpctrain.runtime.signals import StopFlag
from hpctrain.training import rng
from hpctrain.training.checkpointing import Checkpointing
from hpctrain.training.data.loading import Loading, to_device, training_batches
from hpctrain.training.data.plan import BatchPlan, Share
from hpctrain.training.module import Module, as_scalars
from hpctrain.training.optimization import configured
from hpctrain.training.precision import forward_context
from hpctrain.training.progress import format_scalars, make_progress
from hpctrain.training.report import StepReport, StepResult
from hpctrain.training.run_log import RunLog
from hpctrain.training.settings import Settings
from hpctrain.training.state import TrainingState
from hpctrain.training.strategies import find_strategy
from hpctrain.training.validation import validate


class Fit:
    """The state of one training: what a checkpoint holds, and what the loop needs besides."""

    def __init__(
        self,
        *,
        settings: Settings,
        module: Module,
        team: Team,
        plan: BatchPlan,
        last_step: int,
        run: RunDir | None,
        environ: Mapping[str, str],
        stop: StopFlag,
    ) -> None:
        """Put the module on its device and into its strategy. All ranks must call this."""
        self._val_dataset: Any = None
        self._settings, self._team, self._plan, self._stop = settings, team, plan, stop
        self._last_step = last_step
        self._module = module.to(team.device)
        self._strategy = find_strategy(settings.strategy)(module, team)
        self.state = TrainingState(module, configured(module), plan)
        self._loading = Loading(
            settings.num_workers, settings.collate_fn, pin_memory=team.device.type == "cuda"
        )
        self._progress = make_progress(last_step, team.ranks.is_main)
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
            )
        )
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

    def run(self, train_dataset: Any, val_dataset: Any) -> None:
        """Resume, train to the last step; or leave with code 75 where all ranks agreed to stop.

        Raises:
            SystemExit: with code 75, after a stop.
        """
        ranks = self._team.ranks
        self._val_dataset = val_dataset
        rng.seed_all(rng.derived_seed(self._settings.seed, "rank", ranks.rank))
        with self._progress, self._checkpoints:
            self._checkpoints.resume()
            self.state.finished = self.state.step >= self._last_step
            self._module.train()
            self._validate_after_resume()
            steps = range(self.state.step + 1, self._last_step + 1)
            if not steps:
                self._progress.say(
                    f"nothing left to train: step {self.state.step} of {self._last_step} is done"
                )
            batches = training_batches(
                train_dataset,
                self._plan,
                self._loading,
                rank=ranks.rank,
                world_size=ranks.world_size,
                steps=steps,
            )
            report: StepReport | None = None
            for share, batch in batches:
                before, report = report, self._train(share, batch)
                stop = save = False
                if before is not None:
                    result = before.read()
                    self._write(result.step, result.scalars)
                    stop, save = result.stop, result.save
                if stop or save or self._is_boundary():
                    self._at_boundary(report.read(), stop, save)
                    report = None
            self._team.barrier()

    def _train(self, share: Share, batch: Any) -> StepReport:
        """One optimizer step on this rank's share of the global batch."""
        if self._log is not None:
            self._log.share(share)
        team, state = self._team, self.state
        with forward_context(self._settings.precision, team.device):
            output = self._strategy.training_step(to_device(batch, team.device), share.batch_idx)
        scalars = as_scalars(output, "loss", f"{type(self._module).__name__}.training_step")
        if "loss" not in scalars:
            raise UserError(
                f"{type(self._module).__name__}.training_step returned {sorted(scalars)}; "
                "'loss' is missing among them."
            )
        weight = len(share.indices) * team.ranks.world_size / share.batch_size
        loss = scalars["loss"]
        torch.autograd.backward(loss if weight == 1.0 else loss * weight)
        for optimizer in state.optimizers:
            optimizer.step()
        for scheduler in state.schedulers:
            scheduler.step()
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        state.step = share.step
        state.finished = share.step == self._last_step
        return StepReport(
            team,
            share.step,
            share.epoch,
            scalars,
            len(share.indices) / share.batch_size,
            stop=self._stop.is_set,
            save=self._checkpoints.wished(),
        )

    def _is_boundary(self) -> bool:
        """Whether something is due after this step that needs its result, and that all ranks do together."""
        return self._checkpoints.due() or self._validation_due()

    def _at_boundary(self, result: StepResult, stop: bool, save: bool) -> None:
        """Validate, save or leave, in that order of what is lost least if the job ends meanwhile."""
        state = self.state
        state.latest = result.scalars
        self._strategy.align_buffers()
        if (stop or result.stop) and not state.finished:
            self._write(state.step, state.latest, always=True)
            self._checkpoints.leave()
        self._validate_if_due()
        self._write(state.step, state.latest, always=True)
        if save or result.save or self._checkpoints.due():
            self._checkpoints.save()

    def _validation_due(self) -> bool:
        every, step = self._settings.validate_every, self.state.step
        if self._val_dataset is None or every is None or step == 0:
            return False
        period = self._plan.steps_per_epoch if every == "epoch" else every
        return step % period == 0 or step == self._last_step

    def _validate_if_due(self) -> bool:
        """Validate, unless nothing is due or it was done before the run was interrupted at this very step."""
        state = self.state
        if not self._validation_due() or state.validated_step == state.step:
            return False
        state.validation = validate(
            self._module,
            self._val_dataset,
            self._team,
            self._loading,
            global_batch_size=self._plan.global_batch_size,
            precision=self._settings.precision,
        )
        state.validated_step = state.step
        state.latest = {**state.latest, **state.validation}
        self._progress.say(f"step {state.step}: {format_scalars(state.validation)}")
        return True

    def _validate_after_resume(self) -> None:
        """Make up for a validation that a stop came before."""
        if self._validate_if_due():
            self._write(self.state.step, self.state.latest, always=True)

    def _write(self, step: int, scalars: Mapping[str, float], *, always: bool = False) -> None:
        """Show a step, and log it if its number says so or it is `always` to be logged."""
        self._progress.show(step, scalars)
        if self._log is not None:
            self._log.scalars(step, (step - 1) // self._plan.steps_per_epoch, scalars, always=always)
