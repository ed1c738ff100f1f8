"""For a training loop of one's own: ranks, order of the data, checkpoints and the agreement to stop."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpctrain.cluster import detect
from hpctrain.errors import UserError
from hpctrain.rundir import RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.process_group import Team, join
from hpctrain.runtime.signals import StopFlag, listen
from hpctrain.training.callbacks import Callbacks
from hpctrain.training.data.loading import to_device
from hpctrain.training.fit import Fit
from hpctrain.training.module import Module
from hpctrain.training.optimization import Scheduler
from hpctrain.training.rng import seed_all
from hpctrain.training.settings import Settings
from hpctrain.training.strategies import Strategy
from hpctrain.training.strategies.buffers import share_buffers

#: What `Settings` has that a loop of one's own may set.
_OPTIONS = (
    "checkpoint_every",
    "checkpoint_async",
    "keep_checkpoints",
    "keep_every",
    "local_checkpoints",
    "log_every",
    "loggers",
    "record_samples",
    "num_workers",
    "prefetch_factor",
    "data_timeout_s",
    "seed_samples",
    "collate_fn",
)


@contextmanager
def session(
    *, seed: int = 0, run_dir: str | os.PathLike[str] | None = None, **options: Any
) -> Iterator[Session]:
    """Train in a loop of your own, with what the `Trainer` otherwise sees to. All ranks must call this.

    Args:
        seed: decides the order of the data, and random numbers from here on.
        run_dir: where to write; the run's own folder by default.
        options: of the `Trainer`, about checkpoints, logs and data.

    Raises:
        UserError: an option is none of these.
    """
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise UserError(f"session() does not take {unknown[0]!r}; it takes {', '.join(_OPTIONS)}.")
    seed_all(seed)
    folder = run_dir or os.environ.get(RUN_DIR_VARIABLE)
    run = RunDir(Path(folder).absolute()) if folder else None
    ranks = detect(os.environ)
    # Until the ranks have met, whoever is told to stop leaves at once: so do those that wait for it.
    team = join(ranks, os.environ)
    with listen() as stop:
        yield Session(team, {"seed": seed, "run_dir": run_dir, **options}, run, stop)


class Session:
    """Made by `session`.

    Attributes:
        ranks: who this process is.
        device: where it computes.
        weight: what the loss over this rank's batch has to be multiplied by, so that the mean of gradients
            over the ranks is that of the global batch: 1, but where batches cannot be shared evenly.
        ending: why the loop is to end before its last step; None where it is not.
    """

    def __init__(self, team: Team, options: dict[str, Any], run: RunDir | None, stop: StopFlag) -> None:
        self._team, self.ranks, self.device = team, team.ranks, team.device
        self.weight = 1.0
        self.ending: str | None = None
        self._options, self._run, self._stop = options, run, stop
        self._whole = _Whole()
        self._fit: Fit | None = None
        self._part = 1.0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.is_main

    @property
    def step(self) -> int:
        """Completed optimizer steps."""
        return 0 if self._fit is None else self._fit.state.step

    def prepare(self, *things: Any) -> Any:
        """Put modules on this rank's device and let the ranks share their gradients; keep all in checkpoints.

        Args:
            things: modules, optimizers and learning-rate schedules.

        Returns:
            The same in the same order, alone where it is one; modules that take gradients are wrapped.

        Raises:
            UserError: one is something else, or `batches` was called before.
        """
        if self._fit is not None:
            raise UserError(
                "prepare() was called after batches(): what it is given has to be loaded by then."
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
        """Yield this rank's share of each global batch, on its device: one for each optimizer step.

        The newest checkpoint is loaded before. The body of the loop makes the step; when it asks for the next
        batch, the state is saved if that is due. All ranks must go through it to its end, once in a session.

        Raises:
            SystemExit: with code 75, when the job was told to stop and the state is saved.
            UserError: nothing was prepared, or the data set cannot be one.
        """
        if not self._whole.optimizers:
            raise UserError(
                "batches() was called before prepare(model, optimizer): there is nothing to train."
            )
        if self._fit is not None:
            raise UserError(
                "batches() was called twice in one session, whose checkpoints are of the first loop."
            )
        settings = Settings(
            max_steps=max_steps, max_epochs=max_epochs, global_batch_size=global_batch_size, **self._options
        )
        fit = self._fit = Fit(
            settings=settings,
            module=self._whole,
            team=self._team,
            train_dataset=dataset,
            val_dataset=None,
            callbacks=Callbacks((), self, self._whole),
            run=self._run,
            environ=os.environ,
            stop=self._stop,
            strategy=_AsItIs,
        )
        with closing(fit.steps()) as steps:
            for step in steps:
                self._part = len(step.share.indices) / step.share.batch_size
                self.weight = self._part * self.ranks.world_size
                for micro_batch in step.micro_batches:
                    try:
                        yield to_device(micro_batch.batch, self.device)
                    except GeneratorExit:
                        self._say_it_was_left(step.share.step)
                        raise

    def end(self, reason: str = "the loop ended it") -> None:
        """End the training a step or two later, and save; one rank that calls it is enough.

        Steps that take less than 5 ms tell each other several at a time: up to 17 more of these are trained.
        A `break` in the loop saves nothing: whether its step was trained, only the loop knows.
        """
        self.ending = reason

    def backward(self, loss: torch.Tensor) -> None:
        """Add to the gradients those of `loss`, a mean over this rank's batch, at its weight."""
        torch.autograd.backward(loss if self.weight == 1.0 else loss * self.weight)

    def log(self, **scalars: torch.Tensor | float) -> None:
        """Have means over this rank's batch averaged over the global batch, shown and written with the step.

        Every rank calls it in every step, with the same names; of one that is logged twice the later stays.
        """
        if self._fit is None:
            raise UserError("log() was called outside of the loop over batches().")
        self._fit.sums.put({name: torch.as_tensor(value) for name, value in scalars.items()}, self._part)

    def accumulating(self, model: nn.Module) -> AbstractContextManager[None]:
        """Backward passes meanwhile add to this rank's gradients, and exchange nothing."""
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()

    def _say_it_was_left(self, step: int) -> None:
        if self.is_main:
            print(
                f"hpctrain: the loop over batches() was left in step {step}, before its end: what was "
                "trained since the last checkpoint is not kept. To end it early, call end() and go on.",
                flush=True,
            )

    def _prepare(self, thing: Any) -> Any:
        if isinstance(thing, nn.Module):
            self._whole.models.append(thing.to(self.device))
            if not self._team.is_distributed or not any(p.requires_grad for p in thing.parameters()):
                return thing
            return DistributedDataParallel(
                thing,
                device_ids=[self.device] if self.device.type == "cuda" else None,
                gradient_as_bucket_view=True,
            )
        if isinstance(thing, torch.optim.Optimizer):
            self._whole.optimizers.append(thing)
            return thing
        if hasattr(thing, "step") and hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            self._whole.schedulers.append(thing)
            return thing
        raise UserError(
            f"prepare() was given a {type(thing).__name__}; it takes modules, optimizers and "
            "learning-rate schedules."
        )


class _Whole(Module):
    """All that was prepared, as one."""

    def __init__(self) -> None:
        super().__init__()
        self.models = nn.ModuleList()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Scheduler] = []

    def configure_optimizers(self) -> Any:
        return self.optimizers, self.schedulers


class _AsItIs(Strategy):
    """What was prepared is on its device already, and shares its gradients by itself."""

    def place(self) -> None:
        pass

    def align_buffers(self) -> None:
        if self.team.is_distributed:
            share_buffers(self.module)
