"""Exact resumption for the Hugging Face Trainer: call `prepare(trainer)` before `trainer.train()`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, TypeVar

from hpctrain.errors import EXIT_CONTINUE, UserError
from hpctrain.runtime.resumed_values import configured_values, ignored_values
from hpctrain.runtime.stopping.stop_signals import should_stop
from hpctrain.training.saving.library_checkpoints import LibraryCheckpoints, check_num_ranks
from hpctrain.training.saving.unsaved_objects import remark_on_unsaved
from hpctrain.training.strategies.ddp import regroup_buckets

try:
    import transformers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"hpctrain.huggingface requires Transformers: {error}. Run `pip install accelerate transformers`."
    ) from error

__all__ = ["RunCallback", "prepare"]

T = TypeVar("T", bound="transformers.Trainer")

#: A checkpoint folder with this file is complete.
_MARKER = "hpctrain-complete"


def prepare(trainer: T) -> T:
    """Configure a `transformers.Trainer` to save to the run folder, resume, and stop on a stop signal.

    `trainer.args.output_dir` is set to the run's `checkpoints`. After a stop signal, all ranks save after the
    same step, and exit with code 75. Without a run folder, the trainer is unchanged.

    Raises:
        UserError: the trainer does not train on all ranks of the job, or saves only the model.
    """
    check_num_ranks(trainer.args.world_size, "Trainer", "TrainingArguments(use_cpu=True)")
    checkpoints = LibraryCheckpoints("checkpoint", marker=_MARKER)
    if checkpoints.run is None:
        return trainer
    if trainer.args.save_only_model:
        raise UserError(
            "A run cannot be resumed with save_only_model=True, because its checkpoints contain no optimizer "
            "state. Remove this setting."
        )
    # The Trainer would delete the previous checkpoint before the new one is complete.
    keep, trainer.args.save_total_limit = trainer.args.save_total_limit, None
    trainer.args.output_dir = str(checkpoints.run.checkpoints)
    trainer.add_callback(RunCallback(trainer, checkpoints, keep))
    train = trainer.train
    load: Any = getattr(trainer, "_load_optimizer_and_scheduler", None)

    def load_and_compare(checkpoint: Any) -> None:
        optimizers, schedulers = [trainer.optimizer], [trainer.lr_scheduler]
        script = configured_values(optimizers, schedulers)
        load(checkpoint)
        ignored = ignored_values(optimizers, schedulers, script, None)
        remedy = "To change the value in a resumed run, set it in the on_train_begin() of a callback."
        checkpoints.report(ignored, [], remedy)

    if load is not None:  # a private method, which other versions may lack
        setattr(trainer, "_load_optimizer_and_scheduler", load_and_compare)  # noqa: B010 (a method)

    @functools.wraps(train)
    def resume(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        should_stop()  # signals are recorded from this point
        newest = checkpoints.newest()
        if newest is not None:
            checkpoints.log_resumed(newest)
            resume_from_checkpoint = str(newest)
        return train(resume_from_checkpoint, *args, **kwargs)

    setattr(trainer, "train", resume)  # noqa: B010 (a method)
    return trainer


class RunCallback(transformers.TrainerCallback):
    """Requests checkpoints, marks complete ones, and stops all ranks after the same step."""

    def __init__(
        self, trainer: transformers.Trainer, checkpoints: LibraryCheckpoints, keep: int | None
    ) -> None:
        self._trainer, self._checkpoints, self._keep = trainer, checkpoints, keep
        self._is_stopping = self._is_save_due = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        regroup_buckets(self._trainer.model_wrapped)
        trained = (self._trainer.model, self._trainer.optimizer)
        self._checkpoints.watch(*(value for value in trained if value is not None))
        unsaved = remark_on_unsaved(
            [*trained, self._trainer.lr_scheduler, self._trainer.accelerator],
            "Pass schedulers to the Trainer. Assign averaged models to the model.",
            steps_by_script=False,
        )
        self._checkpoints.print_message(unsaved)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        # After the last step of an epoch, the evaluation runs first, because a resumed run would omit it.
        if args.eval_strategy == "epoch" and float(state.epoch).is_integer():
            self._is_save_due, control.should_save = control.should_save, False
            return control
        decision = self._checkpoints.decide(state.global_step)
        self._is_stopping = decision == "stop"
        control.should_save |= decision is not None
        return self._save_if_finite(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:  # noqa: ARG002
        # The Trainer evaluates, then saves.
        control.should_save |= self._is_save_due
        self._is_save_due = False
        return self._save_if_finite(state, control)

    def _save_if_finite(self, state: Any, control: Any) -> Any:
        control.should_save = control.should_save and self._checkpoints.is_saveable(state.global_step)
        if self._is_stopping and not control.should_save:
            raise SystemExit(EXIT_CONTINUE)
        return control

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        best = state.best_model_checkpoint
        self._checkpoints.mark(state.global_step, self._keep, Path(best).name if best else None)
        if self._is_stopping:
            raise SystemExit(EXIT_CONTINUE)
