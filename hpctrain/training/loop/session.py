"""Provide ranks, data order, checkpoints and the coordinated stop to a custom training loop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from hpctrain.cluster import detect
from hpctrain.errors import UserError
from hpctrain.rundir import RunDir, find_output
from hpctrain.runtime.distributed_context import DistributedContext, init_distributed
from hpctrain.runtime.stopping.stop_signals import StopFlag, capture_stop_signals
from hpctrain.runtime.unfinished_training import TrainingMarker
from hpctrain.training.base.metric_accumulator import TOKENS_FIELD
from hpctrain.training.base.rng import seed_all
from hpctrain.training.callbacks import CallbackList
from hpctrain.training.data.loader_config import to_device
from hpctrain.training.loop.training_loop import TrainingLoop, build_training_loop
from hpctrain.training.module import Module, check_initialized
from hpctrain.training.optim.optimizer_setup import LRScheduler
from hpctrain.training.saving.unsaved_objects import remark_on_unsaved
from hpctrain.training.strategies import Strategy, resolve_strategy
from hpctrain.training.trainer_config import TrainerConfig

#: The options of `TrainerConfig` that a custom loop may set.
_OPTIONS = (
    *("checkpoint_every", "checkpoint_async", "keep_last", "keep_every", "local_checkpoints"),
    *("memory_copies", "on_bad_loss", "loss_spike_threshold", "log_every", "loggers", "hparams"),
    *("record_samples", "num_workers", "prefetch_factor", "dataloader_timeout_s", "seed_samples"),
    "collate_fn",
)


@contextmanager
def session(
    *, seed: int = 0, run_dir: str | os.PathLike[str] | None = None, **options: Any
) -> Iterator[Session]:
    """Provide the `Trainer`'s infrastructure to your own loop.

    Args:
        seed: seed of the data order and of all subsequent random numbers.
        run_dir: output folder; the run folder by default.
        options: options of the `Trainer` about checkpoints, logs and data.

    Raises:
        UserError: an option is not supported.
    """
    if unknown := sorted(set(options) - set(_OPTIONS)):
        raise UserError(f"session() has no option {unknown[0]!r}. Choose from {', '.join(_OPTIONS)}.")
    if options.get("on_bad_loss") in ("skip", "rollback"):
        raise UserError(
            f"on_bad_loss is {options['on_bad_loss']!r}, but a custom loop performs its own updates, so "
            "session() can only stop the run. Use 'stop' or None."
        )
    seed_all(seed)
    run = find_output(run_dir, os.environ)
    ranks = detect(os.environ)
    # Install handlers only after the rendezvous: earlier stop signals end the process immediately, because
    # the ranks cannot agree on a stop yet.
    context = init_distributed(ranks, os.environ)
    with capture_stop_signals(repeats_late=True) as stop:
        custom_loop = Session(context, {"seed": seed, "run_dir": run_dir, **options}, run, stop)
        try:
            yield custom_loop
        except BaseException as error:
            custom_loop._training.record_exception(error)
            raise


class Session:
    """Handle of a custom training loop, created by `session`.

    Attributes:
        ranks: rank, world size and node of this process.
        device: device that this rank uses.
        weight: factor for the loss of this rank's batch. With this factor, the mean of the ranks' gradients
            is the gradient of the global batch. 1 if all ranks have batches of equal size.
        ending: reason to end the loop before its last step; None if `end` has not been called.
    """

    def __init__(
        self, context: DistributedContext, options: dict[str, Any], run: RunDir | None, stop: StopFlag
    ) -> None:
        self._context, self.ranks, self.device = context, context.ranks, context.device
        self.weight = 1.0
        self.ending: str | None = None
        self._options, self._run, self._stop = options, run, stop
        self._prepared = _PreparedModules()
        self._loop: TrainingLoop | None = None
        self._training = TrainingMarker("the loop over batches()", run and run.path, os.environ)
        self._part = 1.0

    @property
    def is_main(self) -> bool:
        """True on rank 0."""
        return self.ranks.is_main

    @property
    def step(self) -> int:
        """Number of completed optimizer steps."""
        return 0 if self._loop is None else self._loop.state.step

    def prepare(self, *things: Any) -> Any:
        """Put modules on this rank's device and synchronize their gradients; add all `things` to checkpoints.

        Args:
            things: modules, optimizers, learning-rate schedules and gradient scalers.

        Returns:
            The things in the same order, or the only one. With several ranks, trainable modules are wrapped.

        Raises:
            UserError: a thing has an unsupported type, or `batches` has already been called.
        """
        if self._loop is not None:
            raise UserError(
                "prepare() was called after batches(). Call prepare() first: batches() loads the "
                "checkpoint into the prepared objects."
            )
        prepared = [self._prepare(thing) for thing in things]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def batches(
        self,
        dataset: Any,
        *,
        global_batch_size: int,
        max_steps: int | None = None,
        max_epochs: int | None = None,
    ) -> Iterator[Any]:
        """Collective. Yield this rank's share of each global batch, on its device: one per optimizer step.

        Loads the newest checkpoint first. The loop body performs the step; a due checkpoint is saved when the
        loop requests the next batch. Iterate to the end, once per session.

        Raises:
            SystemExit: with code 75, after a stop signal, when the state is saved.
            UserError: `prepare` was not called, or the data set is not usable.
        """
        with self._training as training:
            length = {"max_steps": max_steps, "max_epochs": max_epochs}
            self._loop = self._make_loop(dataset, global_batch_size=global_batch_size, **length)
            yield from self._batches(training, self._loop)

    def end(self, reason: str = "end() was called") -> None:
        """End training one or two steps later, and save. A call on a single rank is sufficient.

        Short steps share messages between ranks, so up to 17 more steps are trained. A `break` in the loop
        saves nothing, because the state of its step is unknown.
        """
        self.ending = reason

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, a mean over this rank's batch, multiplied by `weight`."""
        torch.autograd.backward(loss if self.weight == 1.0 else loss * self.weight)

    def log(self, **scalars: torch.Tensor | float) -> None:
        """Collective. Average `scalars` over the global batch; show and log them with the step.

        Each value must be a mean over the yielded batch. Call this for every batch, with the same names. If a
        name is logged twice, the last value is used.
        """
        if self._loop is None:
            raise UserError("log() was called before the loop over batches(). Call log() inside this loop.")
        if TOKENS_FIELD in scalars:
            raise UserError(
                f"log() received {TOKENS_FIELD!r}, which has a special meaning. Log it with another name."
            )
        values = {name: torch.as_tensor(value) for name, value in scalars.items()}
        self._loop.metrics.put(values, self._part)

    def _make_loop(self, dataset: Any, **length: Any) -> TrainingLoop:
        if not self._prepared.optimizers:
            raise UserError(
                "batches() was called, but prepare() has received no optimizer, so nothing would be "
                "trained. Call prepare(model, optimizer) first."
            )
        if self._loop is not None:
            raise UserError(
                "batches() was called twice in one session. Create a new session for each loop: the "
                "checkpoints of a session belong to its first loop."
            )
        settings = TrainerConfig(**length, **self._options)
        resolve_strategy(settings, os.environ)
        callbacks, data = CallbackList((), self, self._prepared), (dataset, None)
        return build_training_loop(
            *(settings, self._prepared, self._context, data, callbacks, self._run, os.environ, self._stop),
            strategy=_PreparedStrategy,
        )

    def _batches(self, training: TrainingMarker, loop: TrainingLoop) -> Iterator[Any]:
        training.set_last_step(loop.last_step)
        saved = (self._prepared, self._prepared.optimizers, self._prepared.schedulers)
        message = remark_on_unsaved(saved, "Pass them to prepare().")
        if message and self.is_main:
            print(f"hpctrain: {message}", flush=True)
        with closing(loop.steps()) as steps:
            for step in steps:
                training.step = self.step
                self._part = len(step.rank_batch.indices) / step.rank_batch.batch_size
                self.weight = self._part * self.ranks.world_size
                for micro_batch in step.micro_batches:
                    try:
                        yield to_device(micro_batch.batch, self.device)
                    except GeneratorExit:
                        if self.is_main:
                            print(
                                f"hpctrain: The loop over batches() ended early, in step "
                                f"{step.rank_batch.step}. Work since the last checkpoint is lost. To end "
                                "training early, call end() and keep iterating until the loop stops.",
                                flush=True,
                            )
                        raise

    def _prepare(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            check_initialized(value)
            self._prepared.models.append(value.to(self.device))
            # The copy in an AveragedModel is not trained.
            is_trained = any(p.requires_grad for p in value.parameters()) and type(value) is not AveragedModel
            if not self._context.is_distributed or not is_trained:
                return value
            device_ids = [self.device] if self.device.type == "cuda" else None
            return DistributedDataParallel(value, device_ids=device_ids, gradient_as_bucket_view=True)
        if isinstance(value, torch.optim.Optimizer):
            self._prepared.optimizers.append(value)
            return value
        if hasattr(value, "step") and hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self._prepared.schedulers.append(value)
            return value
        raise UserError(
            f"prepare() received an object of type {type(value).__name__}, but accepts only modules, "
            "optimizers, learning-rate schedulers and gradient scalers."
        )


class _PreparedModules(Module):
    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleList()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[LRScheduler] = []

    def configure_optimizers(self) -> Any:
        return self.optimizers, self.schedulers


class _PreparedStrategy(Strategy):
    """Strategy for prepared modules, which are on their device and synchronize gradients themselves."""

    def place(self) -> None:
        pass
