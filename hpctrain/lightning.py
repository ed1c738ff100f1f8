"""Resume Lightning exactly: use `hpctrain.lightning.Trainer` instead of `lightning.Trainer`."""

from __future__ import annotations

import math
import os
import signal
import warnings
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from hpctrain.cluster import Ranks, detect
from hpctrain.errors import EXIT_CONTINUE
from hpctrain.rundir import RUN_DIR_VARIABLE
from hpctrain.runtime.resumed_values import (
    advance_period,
    check_ends,
    configured_values,
    ignored_values,
)
from hpctrain.runtime.stopping.signal_recorder import STOP_SIGNALS
from hpctrain.runtime.stopping.stop_signals import should_stop
from hpctrain.training.base import rng
from hpctrain.training.data.loader_config import is_permutation
from hpctrain.training.data.stateful_batch_sampler import StatefulBatchSampler
from hpctrain.training.saving.library_checkpoints import LibraryCheckpoints
from hpctrain.training.saving.unsaved_objects import TRAINER_REMEDY, overrides_any, remark_on_unsaved
from hpctrain.training.strategies.ddp import regroup_buckets

try:
    import lightning
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"hpctrain.lightning requires Lightning: {error}. Run `pip install lightning`."
    ) from error

__all__ = ["HpctrainEnvironment", "RunCheckpoint", "Trainer"]


class HpctrainEnvironment(TorchElasticEnvironment):
    """Ranks for Lightning, as hpctrain detects them under any launcher. Disables Lightning's requeue."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    @staticmethod
    def detect() -> bool:
        return RUN_DIR_VARIABLE in os.environ

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Accept any number of ranks per node."""

    def world_size(self) -> int:
        return self._ranks.world_size

    def global_rank(self) -> int:
        return self._ranks.rank

    def local_rank(self) -> int:
        return self._ranks.local_rank

    def node_rank(self) -> int:
        return self._ranks.node_rank


class RunCheckpoint(lightning.Callback):
    """Saves to the run folder, stops all ranks between the same two batches, and restores the position.

    `Trainer` adds this callback. To set its options, pass an instance in `callbacks`.
    """

    def __init__(self, *, every_n_train_steps: int | None = None, keep_last: int = 3) -> None:
        """Form the process group if the script has not done so.

        Args:
            every_n_train_steps: optimizer steps between two checkpoints. None saves every ten minutes.
            keep_last: number of newest checkpoints to keep.
        """
        self.checkpoints = LibraryCheckpoints(
            "lightning", keep_last=keep_last, every_n_steps=every_n_train_steps
        )
        self._loader: _ResumableLoader | _StatefulLoader | None = None
        self._checked_step = 0
        self.is_saving = self._is_final = False
        self._trainer: lightning.Trainer | None = None
        self.resumed: dict[str, Any] = {}
        self._script: dict[str, Any] = {}
        self._handlers: dict[int, Any] = {}

    def begin(self, trainer: lightning.Trainer) -> None:
        """Start recording stop signals, before `trainer` trains."""
        self._trainer = trainer
        should_stop()
        self._handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def attach(self, trainer: lightning.Trainer, loader: Any) -> Any:
        """Return the training loader in a form whose position can be restored, if possible."""
        is_loader = isinstance(loader, DataLoader)
        if is_loader and hasattr(loader, "state_dict"):
            self._loader = _StatefulLoader(loader, self)
        elif is_loader and _is_replaceable(loader) and not _has_own_shards(trainer, loader):
            self._loader = _ResumableLoader(trainer, loader, self)
        else:
            name = type(loader).__name__
            name += f" with the sampler {type(loader.sampler).__name__}" if is_loader else ""
            self.checkpoints.print_message(
                f"the position of the training loader, a {name}, cannot be restored. If a run is interrupted "
                "during an epoch, its samples differ from those of an uninterrupted run. Use a DataLoader "
                "with hpctrain.StatefulBatchSampler."
            )
            return loader
        # Lightning does not detect that the position is restored.
        warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before the epoch")
        return self._loader

    def on_fit_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        # Lightning has created the optimizers, but has not loaded their states yet.
        self._script = configured_values(trainer.optimizers, _schedulers(trainer))

    def on_train_start(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        # Lightning's handler of SIGTERM communicates with other ranks, which may be in another collective.
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._checked_step = trainer.global_step
        regroup_buckets(trainer.strategy.model)
        self.checkpoints.watch(pl_module, *trainer.optimizers)
        self._report_differences(trainer, pl_module)

    def _report_differences(self, trainer: lightning.Trainer, pl_module: Any) -> None:
        schedulers = _schedulers(trainer)
        configured = self.resumed.get("configured")
        ignored = ignored_values(trainer.optimizers, schedulers, self._script, configured)
        self._script = configured or self._script
        stateful = [
            callback
            for callback in trainer.callbacks  # type: ignore[attr-defined]
            if overrides_any(callback, ("state_dict", "on_save_checkpoint"))
            or type(callback).__module__.startswith("lightning.")
        ]
        saved = [pl_module, *trainer.optimizers, *schedulers, trainer.precision_plugin, *stateful]
        if overrides_any(pl_module, ("on_save_checkpoint",)):
            saved.append(vars(pl_module))
        unsaved = remark_on_unsaved(saved, TRAINER_REMEDY, steps_by_script=False)
        remedy = "To change the value in a resumed run, set it in the on_train_start() of the module."
        ends: list[str] = []
        if pl_module.automatic_optimization and math.isfinite(trainer.estimated_stepping_batches):
            batches = trainer.num_training_batches / trainer.accumulate_grad_batches
            steps = math.ceil(batches) if math.isfinite(batches) else None
            schedules = [
                (c.scheduler, advance_period(c.interval, c.frequency, c.reduce_on_plateau, steps))
                for c in trainer.lr_scheduler_configs
            ]
            last_step = int(trainer.estimated_stepping_batches)
            ends = check_ends(schedules, last_step, ignored, can_change=False)
        self.checkpoints.report(ignored, [unsaved, *ends], remedy)

    def on_train_batch_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        # Between two steps of the optimizer there are gradients, which are not saved.
        if trainer.global_step == self._checked_step:
            return
        self._checked_step = trainer.global_step
        decision = self.checkpoints.decide(trainer.global_step)
        if decision is not None:
            self._save(trainer)
        if decision == "stop":
            raise SystemExit(EXIT_CONTINUE)

    def on_before_backward(self, trainer: lightning.Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        del pl_module
        # The strategy averages over the ranks, whose shares of a batch may differ.
        if isinstance(self._loader, _ResumableLoader) and loss.requires_grad:
            weight = self._loader.weight(trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_idx)
            if weight != 1.0:
                loss.register_hook(lambda gradient: gradient * weight)  # type: ignore[no-untyped-call]

    def on_train_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        if self._checked_step != trainer.global_step:
            self._checked_step = trainer.global_step
            self._save(trainer, is_final=True)

    def _save(self, trainer: lightning.Trainer, *, is_final: bool = False) -> None:
        self.is_saving, self._is_final = not is_final, is_final
        try:
            self.checkpoints.save(trainer.global_step, trainer.save_checkpoint)
        finally:
            self.is_saving = self._is_final = False

    def state_dict(self) -> dict[str, Any]:
        """Return position and random states; in a checkpoint of hpctrain, those before the next batch."""
        loader = self._loader
        random, position = rng.capture_rng_state(), None if loader is None else loader.position()
        if loader is not None and self.is_saving:
            random, position = loader.before_fetch
        return {
            "position": position,
            "random": self.checkpoints.context.all_gather(random, "the random state"),
            "step": self._checked_step,
            "ended": self._is_final and self._trainer is not None and self._trainer.should_stop,
            "configured": self._script,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.resumed.update(state_dict, restore=True)
        if state_dict.get("ended") and self._trainer is not None:
            self._trainer.should_stop = True  # such as by EarlyStopping, which Lightning does not save

    def restore_rng_state(self) -> None:
        """Restore the random state of a loaded checkpoint, if this has not been done."""
        if self.resumed.pop("restore", None):
            self.checkpoints.restore_rng_state(self.resumed["random"], self.resumed["step"])

    def on_save_checkpoint(self, trainer: lightning.Trainer, _: Any, checkpoint: dict[str, Any]) -> None:
        fit_loop = checkpoint["loops"]["fit_loop"]
        if self.is_saving:
            # Lightning counts the batch that has begun when it loads this.
            fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
        # Lightning counts the last epoch as complete, but keeps the number of its batches.
        if self._is_final and trainer.fit_loop.epoch_loop._num_ready_batches_reached():
            batches = fit_loop["epoch_loop.batch_progress"]
            batches |= {"current": dict.fromkeys(batches["current"], 0), "is_last_batch": False}
        elif self._is_final:
            for counts in fit_loop["epoch_progress"].values():
                counts["processed"] -= 1
                counts["completed"] -= 1


class LightningTrainer(lightning.Trainer):
    """Lightning's Trainer, with the ranks, the run folder and the checkpoints of the job.

    It resumes automatically. After a stop signal, it exits with code 75 once its state is saved. With neither
    a run nor a launcher, it behaves like Lightning's Trainer.
    """

    def __init__(self, **kwargs: Any) -> None:
        """Accept the arguments of `lightning.Trainer`; the job determines `num_nodes` and `devices`."""
        ranks = detect(os.environ)
        self._run_checkpoint: RunCheckpoint | None = None
        if ranks.world_size > 1 or RUN_DIR_VARIABLE in os.environ:
            callbacks = _as_list(kwargs.get("callbacks"))
            checkpoint = next((value for value in callbacks if isinstance(value, RunCheckpoint)), None)
            self._run_checkpoint = checkpoint = checkpoint or RunCheckpoint()
            kwargs |= {
                "callbacks": [*(value for value in callbacks if value is not checkpoint), checkpoint],
                "plugins": [*_as_list(kwargs.get("plugins")), HpctrainEnvironment(ranks)],
                "num_nodes": ranks.num_nodes,
                "devices": ranks.local_world_size,
            }
            run = checkpoint.checkpoints.run
            if run is not None and kwargs.get("default_root_dir") is None:
                kwargs["default_root_dir"] = str(run.path)
            for callback in callbacks:
                # LightningCLI's callback refuses the configuration that an earlier attempt has saved.
                if type(callback).__name__ == "SaveConfigCallback":
                    callback.overwrite = True
        super().__init__(**kwargs)

    def fit(
        self,
        model: Any,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: Any = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Resume from the newest checkpoint of the run; without one, behave like Lightning.

        Raises:
            SystemExit: with code 75 after a stop signal, once the state is saved.
        """
        if (checkpoint := self._run_checkpoint) is not None:
            checkpoint.begin(self)
            if train_dataloaders is None or isinstance(train_dataloaders, lightning.LightningDataModule):
                host = datamodule or train_dataloaders or model
                make = host.train_dataloader
                setattr(host, "train_dataloader", lambda: checkpoint.attach(self, make()))  # noqa: B010
            else:
                train_dataloaders = checkpoint.attach(self, train_dataloaders)
            newest = checkpoint.checkpoints.newest()
            if newest is not None:
                checkpoint.checkpoints.log_resumed(newest)
                # It contains what the script's objects save, and was written by this run.
                ckpt_path, weights_only = newest, False
        super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)


Trainer = LightningTrainer


class _TrackedLoader:
    """A training loader that records the state before the batch that was fetched last."""

    def __init__(self, loader: Any, callback: RunCheckpoint) -> None:
        self._original, self._callback = loader, callback
        self.before_fetch: tuple[dict[str, torch.Tensor], dict[str, Any] | None] = ({}, None)

    def position(self) -> dict[str, Any] | None:
        raise NotImplementedError

    @property
    def _inner(self) -> Any:
        return self._original

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._inner)
        while True:
            self._callback.restore_rng_state()
            self.before_fetch = rng.capture_rng_state(), self.position()
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch


class _ResumableLoader(_TrackedLoader):
    """A training loader with a StatefulBatchSampler, built when Lightning knows its ranks."""

    def __init__(self, trainer: lightning.Trainer, loader: DataLoader[Any], callback: RunCheckpoint) -> None:
        super().__init__(loader, callback)
        self._trainer = trainer
        self.dataset, self.num_workers = loader.dataset, loader.num_workers
        self.batch_size = loader.batch_size

    @cached_property
    def sampler(self) -> StatefulBatchSampler:
        sampler = self._original.batch_sampler
        if not isinstance(sampler, StatefulBatchSampler):
            ranks = self._trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
            original = self._original.sampler
            is_distributed = isinstance(original, DistributedSampler)
            sampler = StatefulBatchSampler(
                self._original.dataset,
                self._original.batch_size * ranks["num_replicas"],
                seed=int(os.environ.get("PL_GLOBAL_SEED", "0")),
                shuffle=original.shuffle if is_distributed else isinstance(original, RandomSampler),
                drop_last=self._original.drop_last,
                **ranks,
            )
        # Only the epoch of the checkpoint is resumed.
        if position := self._callback.resumed.pop("position", None):
            sampler.load_state_dict(position)
        return sampler

    @cached_property
    def _inner(self) -> Any:
        if self._original.batch_sampler is self.sampler:
            return self._original
        names = (
            *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "generator"),
            *("in_order", "multiprocessing_context", "prefetch_factor", "persistent_workers"),
        )
        options = {name: getattr(self._original, name) for name in names}
        return DataLoader(self.dataset, batch_sampler=self.sampler, **options)

    def weight(self, epoch: int, batch_idx: int) -> float:
        """Return the factor for the loss of a batch; 1 if the script weights the loss itself."""
        if self._original.batch_sampler is self.sampler:
            return 1.0
        return self.sampler.weight_of(epoch * len(self.sampler) + batch_idx + 1)

    def position(self) -> dict[str, Any]:
        return self.sampler.state_dict()


class _StatefulLoader(_TrackedLoader):
    """A training loader whose state Lightning saves. Checkpoints contain the one before the last batch."""

    def position(self) -> None:
        self._state_before: dict[str, Any] = self._original.state_dict()

    def state_dict(self) -> dict[str, Any]:
        return self._state_before if self._callback.is_saving else {**self._original.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._original.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def _as_list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, (list, tuple)) else [values] if values else []


def _schedulers(trainer: lightning.Trainer) -> list[Any]:
    return [config.scheduler for config in trainer.lr_scheduler_configs]


def _has_own_shards(trainer: lightning.Trainer, loader: DataLoader[Any]) -> bool:
    """Return true if each rank has its own samples, which must not be divided again."""
    divides = trainer._accelerator_connector.use_distributed_sampler
    return not divides and trainer.world_size > 1 and not isinstance(loader.sampler, DistributedSampler)


def _is_replaceable(loader: DataLoader[Any]) -> bool:
    """True if the loader takes all samples once per epoch, in an order that can be replaced."""
    if isinstance(loader.batch_sampler, StatefulBatchSampler):
        return True
    if type(loader.batch_sampler) is not BatchSampler:
        return False
    is_ordered = type(loader.sampler) in (SequentialSampler, DistributedSampler)
    return is_ordered or is_permutation(loader.sampler, loader.dataset)
