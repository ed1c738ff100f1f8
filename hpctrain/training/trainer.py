"""Trainer whose result is the same even if training is stopped and resumed at any step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch

from hpctrain.cluster import Ranks, detect
from hpctrain.errors import UserError
from hpctrain.rundir import RUN_DIR_VARIABLE, find_output
from hpctrain.runtime.distributed_context import DistributedContext, init_distributed
from hpctrain.runtime.resumed_values import inner_scheduler
from hpctrain.runtime.stopping.stop_signals import capture_stop_signals
from hpctrain.runtime.unfinished_training import TrainingMarker
from hpctrain.training.algorithms import Algorithm, find_algorithm, register_algorithm
from hpctrain.training.base.device_selection import find_devices, has_launcher, process_devices, with_devices
from hpctrain.training.base.rng import seed_all
from hpctrain.training.callbacks import CallbackList
from hpctrain.training.loop.spawn import spawn_ranks
from hpctrain.training.loop.training_loop import build_training_loop
from hpctrain.training.loop.validation import Evaluation
from hpctrain.training.module_run import ModuleRun, canonical_arguments, lightning_base
from hpctrain.training.saving.unsaved_objects import TRAINER_REMEDY, overrides_any, remark_on_unsaved
from hpctrain.training.strategies import (
    Strategy,
    check_launch,
    find_strategy,
    register_strategy,
    resolve_strategy,
)
from hpctrain.training.trainer_config import TrainerConfig

#: Run folders in which this process has completed a training.
_TRAINED: set[Path] = set()


class Trainer(TrainerConfig):
    """Trainer of a `Module`, with the same result on any number of ranks.

    Create the trainer before the module: it seeds the random generators that initialize the weights.

    Attributes:
        ranks: rank, world size and node of this process.
        step: number of completed optimizer steps.
        metrics: results of the latest validation.
        optimizers: optimizers of the module, from the start of `fit`.
        schedulers: learning-rate schedulers of the module, from the start of `fit`.
        ending: reason to end training before its last step; None if `end` has not been called.

    Raises:
        UserError: a setting is out of range, or contradicts another or the launcher.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        resolve_strategy(self, os.environ)
        self.ranks: Ranks = detect(os.environ)
        check_launch(self, self.ranks, os.environ)
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.schedulers: list[Any] = []
        self.ending: str | None = None
        seed_all(self.seed)

    @property
    def is_main(self) -> bool:
        return self.ranks.is_main

    def fit(
        self,
        module: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        *,
        datamodule: Any = None,
        **lightning: Any,
    ) -> None:
        """Collective. Train `module`, starting from the newest checkpoint of the run, if any.

        Args:
            module: the model, a `Module` or a LightningModule; contains the trained weights afterwards, on
                every rank.
            train_dataset: a map-style data set, with `len()` and `[index]` or `__getitems__([indices])`;
                tensors or NumPy arrays of equal length, alone or in a TensorDataset, a tuple or a dict; a
                stream, which is an `IterableDataset`; or a DataLoader with one of these.
            val_dataset: data of one of these kinds, or None for no validation.
            datamodule: a LightningDataModule, for a LightningModule.
            **lightning: arguments of Lightning's `fit`: `model`, `train_dataloaders`, `val_dataloaders`,
                `ckpt_path`.

        Raises:
            SystemExit: with code 75, after a stop signal, once the state is saved.
            BadLoss: a loss is NaN, infinite or far too high, and `on_bad_loss` ends the training.
            CheckpointError: the state after the last step was not saved.
            DataWorkerKilled: a data worker was killed, for example because memory ran out.
            RendezvousError: the ranks did not form a process group.
            SilentCorruption: the replicas of the state differ.
            UserError: a data set is empty, or neither map-style nor a stream; or the process has already
                completed a training in the run folder.
        """
        arguments = {"module": module, "train_dataset": train_dataset, "val_dataset": val_dataset}
        data = canonical_arguments("fit", {**arguments, "datamodule": datamodule}, lightning)
        run = find_output(self.run_dir, os.environ)
        with TrainingMarker("Trainer.fit()", run and run.path, os.environ) as training:
            if run is not None and not self.run_dir and run.path in _TRAINED:
                raise UserError(
                    f"This process has already completed fit() in {run.path} ({RUN_DIR_VARIABLE}), and the "
                    "checkpoints of that training are there. Set a separate folder for one of the trainers "
                    "with Trainer(run_dir=…)."
                )
            self._fit(training, data.pop("module"), data)
        if run is not None:
            _TRAINED.add(run.path)

    def _fit(self, training: TrainingMarker, module: Any, data: dict[str, Any]) -> None:
        if not hasattr(module, "configure_optimizers"):
            raise UserError(
                f"fit() received a module of type {type(module).__name__}, which has no "
                "configure_optimizers method. Pass an hpctrain.Module or a LightningModule."
            )
        self.ending, self.optimizers, self.schedulers = None, [], []
        devices = self._selected_devices()
        runs_here = has_launcher(self.ranks) or self._strategy.single_process
        if devices and not runs_here and (self._strategy.spawns or len(devices) > 1):
            self._fit_in_processes(devices, module, data)
            return
        # Install handlers only after the rendezvous: earlier stop signals end the process immediately,
        # because the ranks cannot agree on a stop yet.
        context = self._init_distributed(devices)
        with (
            capture_stop_signals(repeats_late=True) as stop,
            _run_class(module)(self, module, context, data["datamodule"], "fit") as module_run,
        ):
            train_dataset = module_run.find_data(data["train_dataset"], "train")
            val_dataset = module_run.find_data(data["val_dataset"], "val")
            if train_dataset is None:
                raise UserError(
                    "fit() received no training data. Pass train_dataset, or define train_dataloader() in "
                    "the module."
                )
            callbacks = CallbackList([*self.callbacks, *module_run.callbacks], self, module)
            data_sets, run = (train_dataset, val_dataset), find_output(self.run_dir, os.environ)
            loop = build_training_loop(self, module, context, data_sets, callbacks, run, os.environ, stop)
            training.set_last_step(loop.last_step)
            self.optimizers = list(loop.state.optimizers)
            self.schedulers = [inner_scheduler(scheduler) for scheduler in loop.state.schedulers]
            if self.is_main and (message := self._remark_on_unsaved(module)):
                print(f"hpctrain: {message}", flush=True)
            try:
                loop.run()
            finally:
                self.step, self.metrics = loop.state.step, loop.state.validation
                training.step = self.step

    def end(self, reason: str = "a callback called end()") -> None:
        """End training before its last step. For use in a `Callback`; a call on one rank is sufficient."""
        self.ending = reason

    def validate(
        self, module: Any = None, dataset: Any = None, *, datamodule: Any = None, **lightning: Any
    ) -> dict[str, float]:
        """Collective. Return the means of `validation_step` over `dataset`.

        Raises:
            UserError: the data set is missing, empty or of an unknown kind.
            RendezvousError: the ranks did not form a process group.
        """
        with self._evaluation("validate", module, dataset, datamodule, lightning) as evaluation:
            return evaluation.means("validation_step")

    def test(
        self, module: Any = None, dataset: Any = None, *, datamodule: Any = None, **lightning: Any
    ) -> dict[str, float]:
        """Collective. Return the means of `test_step` over `dataset`. Raises the errors of `validate`."""
        with self._evaluation("test", module, dataset, datamodule, lightning) as evaluation:
            return evaluation.means("test_step")

    def predict(
        self, module: Any = None, dataset: Any = None, *, datamodule: Any = None, **lightning: Any
    ) -> list[Any]:
        """Collective. Return the outputs of `predict_step` for all batches of `dataset`.

        Every rank receives all outputs, which must fit into its memory; tensors are on the CPU. For a
        map-style data set, batches are in the order of the data set, with any number of ranks. Raises the
        errors of `validate`.
        """
        with self._evaluation("predict", module, dataset, datamodule, lightning) as evaluation:
            return evaluation.predictions()

    @contextmanager
    def _evaluation(
        self, method: str, module: Any, dataset: Any, datamodule: Any, lightning: dict[str, Any]
    ) -> Iterator[Evaluation]:
        arguments = {"module": module, "dataset": dataset, "datamodule": datamodule}
        module, dataset, datamodule = canonical_arguments(method, arguments, lightning).values()
        # Without a launcher, one device is sufficient; no processes are started.
        context = self._init_distributed(self._selected_devices()[:1])
        with _run_class(module)(self, module, context, datamodule, method) as module_run:
            dataset = module_run.find_data(dataset, method)
            with closing(Evaluation(self, module, context, dataset, os.environ)) as evaluation:
                yield evaluation

    def _selected_devices(self) -> list[int | None]:
        """Return the devices of the user's setting, or those of the launcher if a rank has several."""
        is_single = self._strategy.single_process and self.ranks.world_size == 1
        if has_launcher(self.ranks) and not (is_single and self.devices is not None):
            return process_devices(self.ranks, os.environ) if self._strategy.uses_all_devices else []
        default = "auto" if self._strategy.spawns or is_single else None
        devices = default if self.devices is None else self.devices
        use_gpus = self.accelerator != "cpu"
        return [] if devices is None else find_devices(devices, os.environ, use_gpus=use_gpus)

    def _init_distributed(self, devices: list[int | None]) -> DistributedContext:
        context = init_distributed(self.ranks, os.environ, use_gpus=self.accelerator != "cpu")
        return with_devices(context, devices)

    @property
    def _strategy(self) -> type[Strategy]:
        return find_strategy(self.strategy, os.environ)

    def _fit_in_processes(self, devices: list[int | None], module: Any, data: dict[str, Any]) -> None:
        tensors, values = spawn_ranks(
            devices,
            _run_rank,
            caller="Trainer.fit",
            environ=os.environ,
            trainer=self,
            strategy=self._strategy,
            algorithm=type(find_algorithm(self.algorithm)),
            module=module,
            data=data,
        )
        module.load_state_dict({**tensors, **values["extra_state"]})
        self.step, self.metrics = values["step"], values["metrics"]
        CallbackList(self.callbacks, self, module).load_state_dict(values["callbacks"])

    def _remark_on_unsaved(self, module: Any) -> str | None:
        stateful = [callback for callback in self.callbacks if overrides_any(callback, ["state_dict"])]
        attributes = vars(module) if overrides_any(module, ["on_save_checkpoint"]) else None
        saved = [module, attributes, *stateful, *self.optimizers, *self.schedulers]
        return remark_on_unsaved(saved, TRAINER_REMEDY, steps_by_script=False)


def _run_class(module: Any) -> type[ModuleRun]:
    if lightning_base(module) is None:
        return ModuleRun
    from hpctrain.training.lightning_module import LightningRun

    return LightningRun


def _run_rank(
    trainer: Trainer, strategy: type[Strategy], algorithm: type[Algorithm], module: Any, data: dict[str, Any]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Train as one of several ranks; return the tensors of the module, and other results."""
    # The script may have registered these classes, but the script does not run in this process.
    register_strategy(trainer.strategy)(strategy)
    if isinstance(trainer.algorithm, str):
        register_algorithm(trainer.algorithm)(algorithm)
    trainer.ranks = detect(os.environ)
    # The device is already chosen, so a warning would be wrong.
    trainer.devices = None
    # The marker belongs to the call in the parent process.
    trainer._fit(TrainingMarker("Trainer.fit()", None, {}), module, data)
    state = module.state_dict()
    tensors = {name: value.cpu() for name, value in state.items() if isinstance(value, torch.Tensor)}
    return tensors, {
        "extra_state": {name: value for name, value in state.items() if name not in tensors},
        "step": trainer.step,
        "metrics": trainer.metrics,
        "callbacks": CallbackList(trainer.callbacks, trainer, module).state_dict(),
    }
