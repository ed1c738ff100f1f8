"""Checkpoints, data position and coordinated stop for loops with Hugging Face Accelerate."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import RandomSampler

from hpctrain.errors import EXIT_CONTINUE, UserError
from hpctrain.runtime.program.step_hook import restored_steps
from hpctrain.runtime.resumed_values import IgnoredValue, configured_values, ignored_values
from hpctrain.runtime.stopping.stop_signals import should_stop
from hpctrain.training.base import rng
from hpctrain.training.saving.library_checkpoints import LibraryCheckpoints, check_num_ranks
from hpctrain.training.saving.unsaved_objects import remark_on_unsaved
from hpctrain.training.strategies.ddp import regroup_buckets

try:
    from accelerate import Accelerator
    from accelerate.data_loader import SeedableRandomSampler, get_sampler
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"hpctrain.accelerate requires Accelerate: {error}. Run `pip install accelerate`."
    ) from error

__all__ = ["AcceleratorCheckpointer"]

#: File with the values of optimizers and schedulers that the script of the first attempt has set.
_CONFIGURED = "hpctrain-configured.json"


class AcceleratorCheckpointer:
    """Collective. Saves everything that an `Accelerator` has prepared to the run folder, if there is one.

    A step is one batch of the loader, even if gradients are accumulated.
    """

    def __init__(
        self, accelerator: Accelerator, *, every_n_steps: int | None = None, keep_last: int = 3
    ) -> None:
        """Start recording stop signals."""
        check_num_ranks(accelerator.num_processes, "Accelerator", "Accelerator(cpu=True)")
        self._accelerator = accelerator
        self._checkpoints = LibraryCheckpoints(
            "accelerate",
            keep_last=keep_last,
            every_n_steps=every_n_steps,
            to_optimizer_step=self._to_optimizer_step,
        )
        self._loaded_step: int | None = None
        self._configured: dict[str, Any] = {}
        should_stop()

    def load(self) -> int:
        """Load the newest checkpoint; return its step, or 0 if there is none."""
        # The accelerator keeps the models without their wrappers.
        replicas = {id(value.module): value for value in gc.get_objects() if _is_replica(value)}
        for model in self._accelerator._models:
            regroup_buckets(replicas.get(id(model)))
        newest = self._checkpoints.newest()
        accelerator = self._accelerator
        models, optimizers, schedulers = accelerator._models, accelerator._optimizers, accelerator._schedulers
        script = self._configured = configured_values(optimizers, schedulers)
        ignored: list[IgnoredValue] = []
        if newest is not None:
            accelerator.load_state(str(newest))
            self._checkpoints.log_resumed(newest)
            self._loaded_step = self._checkpoints.step_of(newest)
            self._configured = json.loads((newest / _CONFIGURED).read_text())
            ignored = ignored_values(optimizers, schedulers, script, self._configured)
        registered = (accelerator._custom_objects, accelerator.scaler, accelerator._dataloaders)
        unsaved = remark_on_unsaved(
            (models, optimizers, schedulers, *registered),
            "Pass them to accelerator.prepare() or register_for_checkpointing().",
        )
        remedy = "To change the value in a resumed run, set it after load()."
        self._checkpoints.report(ignored, [unsaved], remedy)
        self._checkpoints.watch(*models, *optimizers)
        return self._loaded_step or 0

    def batches(self, loader: Any, step: int) -> Iterator[Any]:
        """Yield the batches after `step`, up to the end of the current epoch.

        Args:
            loader: the prepared loader.
            step: number of batches trained so far, over all epochs.

        Raises:
            UserError: the order of the loader cannot be restored.
        """
        if hasattr(getattr(loader, "base_dataloader", None), "state_dict"):
            raise UserError(
                "use_stateful_dataloader=True restores the position a second time. Remove this setting: "
                "AcceleratorCheckpointer restores the position itself."
            )
        # With several processes, Accelerate wraps the batch sampler.
        batch_sampler = getattr(loader.batch_sampler, "batch_sampler", loader.batch_sampler)
        sampler = get_sampler(loader) or getattr(batch_sampler, "sampler", None)
        if isinstance(sampler, RandomSampler) and not isinstance(sampler, SeedableRandomSampler):
            raise UserError(
                "The sample order of the data loader cannot be restored, because its sampler is not "
                "seedable. Pass dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True) to "
                "Accelerator."
            )
        epoch, position = divmod(step, len(loader))
        loader.set_epoch(epoch)
        random = rng.capture_rng_state() if position and step == self._loaded_step else None
        for batch in self._accelerator.skip_first_batches(loader, position) if position else loader:
            if random is not None:
                # An undisturbed run creates its iterator at the start of the epoch.
                rng.restore_rng_state(random)
                random = None
            yield batch

    def save_if_due(self, step: int) -> None:
        """Save the state after `step` batches if a checkpoint is due, or if the job received a stop signal.

        Does nothing between two optimizer steps, because gradients are not saved.

        Raises:
            SystemExit: with code 75 after a stop signal, once the state is saved.
        """
        if not self._accelerator.sync_gradients:
            return
        decision = self._checkpoints.decide(step)
        if decision is not None:
            self.save(step)
        if decision == "stop":
            raise SystemExit(EXIT_CONTINUE)

    def _to_optimizer_step(self, step: int) -> int:
        """Return the count of the first optimizer, or the batches if it does not count its steps."""
        optimizers = self._accelerator._optimizers
        return (restored_steps(optimizers[0]) if optimizers else None) or step

    def save(self, step: int) -> None:
        """Save the state after `step` batches."""
        self._checkpoints.save(step, self._write)

    def _write(self, path: Path) -> None:
        self._accelerator.save_state(str(path))
        if self._accelerator.is_main_process:
            (path / _CONFIGURED).write_text(json.dumps(self._configured))


def _is_replica(value: object) -> TypeGuard[DistributedDataParallel]:
    # isinstance() would call the properties of proxies.
    return issubclass(type(value), DistributedDataParallel)
