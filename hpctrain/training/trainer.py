"""Trainer whose result is the same even if training is stopped and resumed at any step."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hpctrain.cluster import Ranks, detect
from hpctrain.errors import UserError
from hpctrain.rundir import RUN_DIR_VARIABLE, RunDir, output_folder
from hpctrain.runtime.distributed_context import DistributedContext, init_distributed
from hpctrain.runtime.stopping.stop_signals import capture_stop_signals
from hpctrain.runtime.unfinished_training import TrainingMarker
from hpctrain.text import suggest
from hpctrain.training.algorithms import Algorithm, find_algorithm, register_algorithm
from hpctrain.training.base.device_selection import find_devices, has_launcher, process_devices, with_devices
from hpctrain.training.base.rng import seed_all
from hpctrain.training.callbacks import CallbackList
from hpctrain.training.lightning_module import LightningHooks, lightning_base, module_run
from hpctrain.training.loop.evaluation import Evaluation
from hpctrain.training.loop.spawn import SpawnResult, spawn_ranks
from hpctrain.training.loop.training_loop import build_training_loop
from hpctrain.training.optim.resumed_values import inner_scheduler
from hpctrain.training.saving.unsaved_objects import TRAINER_REMEDY, overrides_any, remark_on_unsaved
from hpctrain.training.strategies import (
    Strategy,
    check_launch,
    find_strategy,
    register_strategy,
    resolve_strategy,
)
from hpctrain.training.trainer_config import TrainerConfig
from hpctrain.training.training_state import TrainingState

#: Names of arguments in the methods of Lightning's Trainer.
_ARGUMENTS = {
    "dataloaders": "dataset",
    "model": "module",
    **dict.fromkeys(("train_dataloader", "train_dataloaders"), "train_dataset"),
    "val_dataloaders": "val_dataset",
}
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
        """Train `module`, starting from the newest checkpoint of the run, if any. All ranks must call this.

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
            UserError: a data set is empty, or neither map-style nor a stream; or the process has already
                completed a training in the run folder.
        """
        folder = output_folder(self.run_dir, os.environ)
        arguments = {"module": module, "train_dataset": train_dataset, "val_dataset": val_dataset}
        arguments = _canonical_arguments("fit", {**arguments, "datamodule": datamodule}, lightning)
        if lightning_base(arguments["train_dataset"], "LightningDataModule") is not None:
            arguments |= {"train_dataset": None, "datamodule": arguments["train_dataset"]}
        with TrainingMarker("Trainer.fit()", folder, os.environ) as training:
            run = self._find_run()
            if run is not None and not self.run_dir and run.path in _TRAINED:
                raise UserError(
                    f"This process has already completed fit() in {run.path} ({RUN_DIR_VARIABLE}), and the "
                    "checkpoints of that training are there. Set a separate folder for one of the trainers "
                    "with Trainer(run_dir=…)."
                )
            self._fit(training, **arguments)
        if run is not None:
            _TRAINED.add(run.path)

    def _fit(
        self, training: TrainingMarker, module: Any, train_dataset: Any, val_dataset: Any, datamodule: Any
    ) -> None:
        if not hasattr(module, "configure_optimizers"):
            raise UserError(
                f"fit() received a module of type {type(module).__name__}, which has no "
                "configure_optimizers method. Pass an hpctrain.Module or a LightningModule."
            )
        self.ending, self.optimizers, self.schedulers = None, [], []
        devices = self._own_devices()
        runs_here = has_launcher(self.ranks) or self._strategy.single_process
        if devices and not runs_here and (self._strategy.spawns or len(devices) > 1):
            data = {"train_dataset": train_dataset, "val_dataset": val_dataset, "datamodule": datamodule}
            self._fit_in_processes(devices, module, data)
            return
        # Install handlers only after the rendezvous: earlier stop signals end the process immediately,
        # because the ranks cannot agree on a stop yet.
        context = self._init_distributed(devices)
        with (
            capture_stop_signals(repeats_late=True) as stop,
            module_run(self, module, context, datamodule, "fit") as module_in_use,
        ):
            callbacks = list(self.callbacks)
            if module_in_use.has_hooks:
                callbacks.append(LightningHooks(module_in_use))
            train_dataset = module_in_use.find_data(train_dataset, "train")
            val_dataset = module_in_use.find_data(val_dataset, "val")
            if train_dataset is None:
                raise UserError(
                    "fit() received no training data. Pass train_dataset, or define train_dataloader() in "
                    "the module."
                )
            loop = build_training_loop(
                settings=self,
                module=module,
                context=context,
                train_dataset=train_dataset,
                val_dataset=val_dataset,
                callbacks=CallbackList(callbacks, self, module),
                run=self._find_run(),
                environ=os.environ,
                stop=stop,
            )
            training.set_last_step(loop.last_step)
            if self.is_main and (message := self._remark_on_unsaved(module, loop.state)):
                print(f"hpctrain: {message}", flush=True)
            self.optimizers = list(loop.state.optimizers)
            self.schedulers = [inner_scheduler(scheduler) for scheduler in loop.state.schedulers]
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
        """Return the means of `validation_step` over `dataset`. All ranks must call this."""
        with self._evaluation("validate", module, dataset, datamodule, lightning) as evaluation:
            return evaluation.means("validation_step", "val_loss")

    def test(
        self, module: Any = None, dataset: Any = None, *, datamodule: Any = None, **lightning: Any
    ) -> dict[str, float]:
        """Return the means of `test_step` over `dataset`. All ranks must call this."""
        with self._evaluation("test", module, dataset, datamodule, lightning) as evaluation:
            return evaluation.means("test_step", "test_loss")

    def predict(
        self, module: Any = None, dataset: Any = None, *, datamodule: Any = None, **lightning: Any
    ) -> list[Any]:
        """Return the outputs of `predict_step` for all batches of `dataset`. All ranks must call this.

        Every rank receives all outputs, which must fit into its memory; tensors are on the CPU. For a
        map-style data set, batches are in the order of the data set, with any number of ranks.
        """
        with self._evaluation("predict", module, dataset, datamodule, lightning) as evaluation:
            return evaluation.predictions()

    @contextmanager
    def _evaluation(
        self, method: str, module: Any, dataset: Any, datamodule: Any, lightning: dict[str, Any]
    ) -> Iterator[Evaluation]:
        arguments = {"module": module, "dataset": dataset, "datamodule": datamodule}
        module, dataset, datamodule = _canonical_arguments(method, arguments, lightning).values()
        if lightning_base(dataset, "LightningDataModule") is not None:
            dataset, datamodule = None, dataset
        # Without a launcher, one device is sufficient; no processes are started.
        devices = self._own_devices()[:1]
        context = self._init_distributed(devices)
        with module_run(self, module, context, datamodule, method) as module_in_use:
            dataset = module_in_use.find_data(dataset, method)
            evaluation = Evaluation(self, module, context, dataset, os.environ)
            try:
                yield evaluation
            finally:
                evaluation.finish()

    def _own_devices(self) -> list[int | None]:
        """Return the devices selected by the user's setting, or by the launcher if a rank has several."""
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
        result = spawn_ranks(
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
        module.load_state_dict(result.weights)
        self.step, self.metrics = result.step, result.metrics
        CallbackList(self.callbacks, self, module).load_state_dict(result.callbacks)

    def _remark_on_unsaved(self, module: Any, state: TrainingState) -> str | None:
        stateful = [callback for callback in self.callbacks if overrides_any(callback, ["state_dict"])]
        attributes = vars(module) if overrides_any(module, ["on_save_checkpoint"]) else None
        return remark_on_unsaved(
            [module, attributes, *stateful, *state.optimizers, *map(inner_scheduler, state.schedulers)],
            TRAINER_REMEDY,
            steps_by_script=False,
        )

    def _find_run(self) -> RunDir | None:
        folder = output_folder(self.run_dir, os.environ)
        return None if folder is None else RunDir(Path(folder).absolute())


def _canonical_arguments(
    method: str, arguments: dict[str, object], lightning: Mapping[str, object]
) -> dict[str, Any]:
    """Return the arguments of a method of the Trainer, of which some have Lightning's names."""
    result = dict(arguments)
    for name, value in lightning.items():
        argument = _ARGUMENTS.get(name, name)
        if name in ("weights_only", "verbose", "return_predictions"):
            continue  # without effect on the result
        if name == "ckpt_path":
            if value is not None and (value != "last" or method != "fit"):
                remedy = "hpctrain uses the weights of the module"
                if method == "fit":
                    remedy = "A run resumes from its newest checkpoint"
                raise UserError(f"{method}(ckpt_path={value!r}): ckpt_path is not supported. {remedy}.")
        elif argument not in result:
            raise UserError(f"{method}() has no argument {name!r}. {suggest(name, result)}")
        elif result[argument] is not None and value is not None:
            raise UserError(f"{method}() received both {argument} and {name}. Pass only one of them.")
        elif value is not None:
            result[argument] = value
    return result


def _run_rank(
    trainer: Trainer, strategy: type[Strategy], algorithm: type[Algorithm], module: Any, data: dict[str, Any]
) -> SpawnResult:
    # The script may have registered these classes, but the script does not run in this process.
    register_strategy(trainer.strategy)(strategy)
    if isinstance(trainer.algorithm, str):
        register_algorithm(trainer.algorithm)(algorithm)
    trainer.ranks = detect(os.environ)
    # The device is already chosen, so a warning would be wrong.
    trainer.devices = None
    # The marker belongs to the call in the parent process.
    trainer._fit(TrainingMarker("Trainer.fit()", None, {}), module, **data)
    weights = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict().items()
    }
    callbacks = CallbackList(trainer.callbacks, trainer, module).state_dict()
    return SpawnResult(weights, trainer.step, trainer.metrics, callbacks)
