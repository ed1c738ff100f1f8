"""One call of `Trainer.fit`: the loop, and what all ranks must do at the same step of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch

from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import EXIT_CONTINUE, CheckpointError, UserError
from hpctrain.rundir import ATTEMPT_VARIABLE, EventKind, RunDir
from hpctrain.runtime.process_group import Team
from hpctrain.runtime.signals import StopFlag
from hpctrain.training import rng
from hpctrain.training.batches import (
    BatchPlan,
    Loading,
    Share,
    to_device,
    training_batches,
)
from hpctrain.training.cadence import CheckpointCadence
from hpctrain.training.module import Module, as_scalars, configured
from hpctrain.training.precision import forward_context
from hpctrain.training.progress import format_scalars, make_progress
from hpctrain.training.records import MetricsFile, SamplesFile
from hpctrain.training.report import StepReport, StepResult
from hpctrain.training.settings import Settings
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
        self.step = 0
        self.validation: dict[str, float] = {}
        self._latest: dict[str, float] = {}
        self._validated_step = 0
        self._val_dataset: Any = None
        self._settings, self._team, self._plan, self._stop = settings, team, plan, stop
        self._last_step = last_step
        self._module = module.to(team.device)
        self._strategy = find_strategy(settings.strategy)(module, team)
        optimization = configured(module)
        self._optimizer, self._scheduler = optimization.optimizer, optimization.scheduler
        self._cadence = CheckpointCadence(settings.checkpoint_every, team.ranks.num_nodes)
        self._loading = Loading(
            settings.num_workers, settings.collate_fn, pin_memory=team.device.type == "cuda"
        )
        self._progress = make_progress(last_step, team.ranks.is_main)
        self._run = run
        if run is not None:
            self._open_run(run, environ)

    def _open_run(self, run: RunDir, environ: Mapping[str, str]) -> None:
        rank = self._team.ranks.rank
        number = environ.get(ATTEMPT_VARIABLE)
        self._attempt: int = self._team.from_main(
            int(number) if number else (run.new_attempt() if rank == 0 else None)
        )
        self._store = CheckpointStore(run.checkpoints, self._team.control, self._settings.keep_checkpoints)
        self._metrics = MetricsFile(run, self._attempt) if rank == 0 else None
        self._samples = (
            SamplesFile(run.samples(self._attempt, rank)) if self._settings.record_samples else None
        )

    def run(self, train_dataset: Any, val_dataset: Any) -> None:
        """Resume, train to the last step; or leave with code 75 where all ranks agreed to stop.

        Raises:
            SystemExit: with code 75, after a stop.
        """
        ranks = self._team.ranks
        self._val_dataset = val_dataset
        rng.seed_all(rng.derived_seed(self._settings.seed, "rank", ranks.rank))
        with self._progress:
            self._resume()
            self._module.train()
            steps = range(self.step + 1, self._last_step + 1)
            if not steps:
                self._progress.say(f"nothing left to train: step {self.step} of {self._last_step} is done")
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
        if self._run is not None and self._samples is not None:
            self._samples.write(share)
        team = self._team
        batch_idx = (share.step - 1) % self._plan.steps_per_epoch
        with forward_context(self._settings.precision, team.device):
            output = self._strategy.training_step(to_device(batch, team.device), batch_idx)
        scalars = as_scalars(output, "loss", f"{type(self._module).__name__}.training_step")
        if "loss" not in scalars:
            raise UserError(
                f"{type(self._module).__name__}.training_step returned {sorted(scalars)}; "
                "'loss' is missing among them."
            )
        weight = share.weight(team.ranks.world_size)
        loss = scalars["loss"]
        torch.autograd.backward(loss if weight == 1.0 else loss * weight)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step = share.step
        return StepReport(
            team,
            share.step,
            share.epoch,
            scalars,
            len(share.indices) / share.batch_size,
            stop=self._stop.is_set,
            save=team.ranks.is_main and self._cadence.wishes(),
        )

    def _is_boundary(self) -> bool:
        """Whether something is due after this step that needs its result, and that all ranks do together."""
        return self.step == self._last_step or self._cadence.due(self.step) or self._validation_due()

    def _at_boundary(self, result: StepResult, stop: bool, save: bool) -> None:
        """Validate, save or leave, in that order of what is lost least if the job ends meanwhile."""
        self._latest = result.scalars
        self._strategy.align_buffers()
        if (stop or result.stop) and self.step < self._last_step:
            self._write(self.step, self._latest, always=True)
            self._leave()
        self._validate_if_due()
        self._write(self.step, self._latest, always=True)
        if save or result.save or self._cadence.due(self.step) or self.step == self._last_step:
            self._save()

    def _validation_due(self) -> bool:
        every = self._settings.validate_every
        if self._val_dataset is None or every is None or self.step == 0:
            return False
        period = self._plan.steps_per_epoch if every == "epoch" else every
        return self.step % period == 0 or self.step == self._last_step

    def _validate_if_due(self) -> None:
        """Validate, unless nothing is due or it was done before the run was interrupted at this very step."""
        if not self._validation_due() or self._validated_step == self.step:
            return
        self.validation = validate(
            self._module,
            self._val_dataset,
            self._team,
            self._loading,
            global_batch_size=self._plan.global_batch_size,
            precision=self._settings.precision,
        )
        self._validated_step = self.step
        self._latest = {**self._latest, **self.validation}
        self._progress.say(f"step {self.step}: {format_scalars(self.validation)}")

    def _write(self, step: int, scalars: Mapping[str, float], *, always: bool = False) -> None:
        """Show a step, and log it if its number says so or it is `always` to be logged."""
        self._progress.show(step, scalars)
        if self._run is None or self._metrics is None:
            return
        if always or step % self._settings.log_every == 0:
            self._metrics.write(step, self._plan.epoch(step), scalars)

    def _save(self) -> bool:
        """Save the state after this step; where that fails, say so and train on. All ranks must call this.

        Raises:
            CheckpointError: the last step's state could not be saved: without it the run has no result.
        """
        if self._run is None:
            return False
        state = {
            "module": self._module.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
            "plan": self._plan.identity(),
            "validated_step": self._validated_step,
            "validation": self.validation,
            "latest": self._latest,
        }
        try:
            saved = self._store.save(self.step, state, rng.capture())
        except CheckpointError as error:
            self._log_event("failure", cause=str(error))
            if self.step == self._last_step:
                raise
            self._progress.say(f"hpctrain: {error} Training goes on; the checkpoints before it stand.")
            return False
        self._cadence.saved(saved.seconds)
        self._log_event(
            "checkpoint",
            step=saved.step,
            path=str(saved.path),
            bytes=saved.total_bytes,
            seconds=saved.seconds,
        )
        return True

    def _resume(self) -> None:
        """Load the newest whole checkpoint of the run, if there is one. All ranks must call this.

        Raises:
            UserError: the checkpoint belongs to another model, data set or batch size.
        """
        if self._run is None:
            return
        loaded, broken = self._store.load_newest()
        for sentence in broken:
            self._progress.say(f"hpctrain: {sentence}")
        if loaded is None:
            if broken:
                self._log_event("resumed", step=0, checkpoint=None, broken=broken)
            return
        state = loaded.state
        if state["plan"] != self._plan.identity():
            raise UserError(
                f"{loaded.path} was trained with {state['plan']}, but this script asks for "
                f"{self._plan.identity()}. "
                "The order of samples depends on these: put them back, or start a new run in a new folder."
            )
        try:
            self._module.load_state_dict(state["module"])
            self._optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise UserError(
                f"{loaded.path} does not fit {type(self._module).__name__} and its optimizer: {error} "
                "Put the model back as it was, or start a new run in a new folder."
            ) from error
        if self._scheduler is not None and state["scheduler"] is not None:
            self._scheduler.load_state_dict(state["scheduler"])
        self.step, self.validation, self._latest = loaded.step, state["validation"], state["latest"]
        self._validated_step = state["validated_step"]
        if loaded.rank_state is not None:
            rng.restore(loaded.rank_state)
        else:
            rank = self._team.ranks.rank
            rng.seed_all(rng.derived_seed(self._settings.seed, "rank", rank, "step", self.step))
        self._log_event("resumed", step=self.step, checkpoint=str(loaded.path), broken=broken)
        self._progress.say(f"resumed after step {self.step} from {loaded.path}")
        validated = self._validated_step
        self._validate_if_due()
        if self._validated_step != validated:
            self._write(self.step, self._latest, always=True)

    def _leave(self) -> NoReturn:
        """Save and leave: the job was told to stop. All ranks must call this."""
        saved = self._save()
        self._log_event("signal", signal=self._stop.signal_name, step=self.step, saved=saved)
        if self._run is None:
            self._progress.say(f"stopping after step {self.step}; nothing is saved without a run folder")
        elif saved:
            self._progress.say(f"stopping after step {self.step}, which is saved")
        raise SystemExit(EXIT_CONTINUE)

    def _log_event(self, kind: EventKind, **fields: Any) -> None:
        if self._run is not None and self._team.ranks.is_main:
            self._run.log_event(kind, self._attempt, **fields)
