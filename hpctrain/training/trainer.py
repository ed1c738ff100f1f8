"""Trains a module, so that stopping and resuming it anywhere changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from hpctrain.cluster import Ranks, detect
from hpctrain.errors import UserError
from hpctrain.rundir import RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.process_group import join
from hpctrain.runtime.signals import listen
from hpctrain.training.algorithms import Algorithm, find_algorithm, register_algorithm
from hpctrain.training.callbacks import Callbacks
from hpctrain.training.devices import find_devices, is_launched, on_devices
from hpctrain.training.evaluation import Evaluation
from hpctrain.training.fit import Fit
from hpctrain.training.launch import Result, train_in_processes
from hpctrain.training.module import Module
from hpctrain.training.rng import seed_all
from hpctrain.training.settings import Settings
from hpctrain.training.strategies import Strategy, find_strategy, register_strategy

#: Folders of runs, from the environment, that this process has trained into.
_TRAINED: set[str] = set()


class Trainer(Settings):
    """Trains a `Module` on any number of ranks with the result of one.

    Make the trainer before the module: it seeds the random generators that initialise the weights.

    Attributes:
        ranks: who this process is.
        step: completed optimizer steps.
        metrics: latest results of validation.
        ending: why the training is to end before its last step; None where it is not.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ranks: Ranks = detect(os.environ)
        self.step = 0
        self.metrics: dict[str, float] = {}
        self.ending: str | None = None
        seed_all(self.seed)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.ranks.is_main

    def fit(self, module: Module, train_dataset: Any, val_dataset: Any = None) -> None:
        """Train `module`, from the newest checkpoint of the run where there is one. All ranks must call this.

        Args:
            module: the model; it has the trained weights afterwards, on every rank.
            train_dataset: a map-style data set: `len()` and `[index]`, or `__getitems__([indices])`; tensors
                or NumPy arrays of equal length, alone or in a TensorDataset, a tuple or a dict; or a stream,
                an `IterableDataset`.
            val_dataset: likewise, or None to validate nothing.

        Raises:
            SystemExit: with code 75, when the job was told to stop and the state is saved.
            UserError: a data set is empty, or neither map-style nor a stream; or this is the second training
                of a process in the run's own folder.
        """
        if not hasattr(module, "configure_optimizers"):
            raise UserError(
                f"fit() was given a {type(module).__name__}, which has no configure_optimizers: give a "
                "hpctrain.Module, whose training_step returns the loss of a batch."
            )
        self.ending = None
        devices = self._own_devices()
        if devices and (self._strategy.spawns or (len(devices) > 1 and not self._strategy.one_process)):
            self._fit_in_processes(devices, module, train_dataset, val_dataset)
            return
        # Until the ranks have met, whoever is told to stop leaves at once: so do those that wait for it.
        team = on_devices(join(self.ranks, os.environ), devices)
        with listen() as stop:
            fit = Fit(
                settings=self,
                module=module,
                team=team,
                train_dataset=train_dataset,
                val_dataset=val_dataset,
                callbacks=Callbacks(self.callbacks, self, module),
                run=self._find_run(),
                environ=os.environ,
                stop=stop,
            )
            try:
                fit.run()
            finally:
                self.step, self.metrics = fit.state.step, fit.state.validation

    def end(self, reason: str = "a callback ended it") -> None:
        """End the training before its last step. What a `Callback` calls; one rank that does is enough."""
        self.ending = reason

    def validate(self, module: Module, dataset: Any) -> dict[str, float]:
        """Means of what `validation_step` returns over `dataset`. All ranks must call this.

        Raises:
            UserError: the data set is empty, or the ranks' results do not fit together.
        """
        with self._evaluation(module, dataset) as evaluation:
            return evaluation.means("validation_step", "val_loss")

    def test(self, module: Module, dataset: Any) -> dict[str, float]:
        """Means of what `test_step` returns over `dataset`. All ranks must call this.

        Raises:
            UserError: the data set is empty, or the ranks' results do not fit together.
        """
        with self._evaluation(module, dataset) as evaluation:
            return evaluation.means("test_step", "test_loss")

    def predict(self, module: Module, dataset: Any) -> list[Any]:
        """What `predict_step` returns for each batch of `dataset`, on every rank. All ranks must call this.

        Batches are in the order of a data set with an index, whatever the number of ranks; tensors are on
        the CPU. They have to fit into each rank's memory.

        Raises:
            UserError: the data set is empty.
        """
        with self._evaluation(module, dataset) as evaluation:
            return evaluation.predictions()

    @contextmanager
    def _evaluation(self, module: Module, dataset: Any) -> Iterator[Evaluation]:
        # One of our own devices is enough: nothing is started for it.
        devices = self._own_devices()[:1]
        team = on_devices(join(self.ranks, os.environ), devices)
        evaluation = Evaluation(self, module, team, dataset, os.environ)
        try:
            yield evaluation
        finally:
            evaluation.finish()

    def _own_devices(self) -> list[int | None]:
        """The devices to choose ourselves, for the user has set them; none where ranks were started."""
        if is_launched(self.ranks):
            if self.devices is not None and self.is_main:
                print(
                    f"hpctrain: devices={self.devices!r} is not looked at: each rank has the device that its "
                    f"launcher ({self.ranks.environment}) gave it"
                )
            return []
        default = "auto" if self._strategy.spawns or self._strategy.one_process else None
        devices = default if self.devices is None else self.devices
        return [] if devices is None else find_devices(devices, os.environ)

    @property
    def _strategy(self) -> type[Strategy]:
        return find_strategy(self.strategy, os.environ)

    def _fit_in_processes(
        self, devices: list[int | None], module: Module, train_dataset: Any, val_dataset: Any
    ) -> None:
        result = train_in_processes(
            devices,
            _be_rank,
            whose="Trainer.fit",
            environ=os.environ,
            trainer=self,
            strategy=self._strategy,
            algorithm=type(find_algorithm(self.algorithm)),
            module=module,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
        )
        module.load_state_dict(result.weights)
        self.step, self.metrics = result.step, result.metrics
        Callbacks(self.callbacks, self, module).load_state_dict(result.callbacks)

    def _find_run(self) -> RunDir | None:
        """The folder to write into: the one that was set, else the run's own, which holds one training.

        Raises:
            UserError: this process has trained into the run's own folder before.
        """
        if self.run_dir:
            return RunDir(Path(self.run_dir).absolute())
        own = os.environ.get(RUN_DIR_VARIABLE)
        if not own:
            return None
        if own in _TRAINED:
            raise UserError(
                f"fit() was called before in this process, and {own} ({RUN_DIR_VARIABLE}) "
                "holds its checkpoints. "
                "Give one of the trainers a folder of its own: Trainer(run_dir=…)."
            )
        _TRAINED.add(own)
        return RunDir(Path(own).absolute())


def _be_rank(
    trainer: Trainer,
    strategy: type[Strategy],
    algorithm: type[Algorithm],
    module: Module,
    train_dataset: Any,
    val_dataset: Any,
) -> Result:
    """What a process does that another process's trainer has started."""
    # A script has registered them maybe, which is not run again here.
    register_strategy(trainer.strategy)(strategy)
    if isinstance(trainer.algorithm, str):
        register_algorithm(trainer.algorithm)(algorithm)
    trainer.ranks = detect(os.environ)
    # There is nothing to choose any more, nor to remark on.
    trainer.devices = None
    trainer.fit(module, train_dataset, val_dataset)
    weights = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in module.state_dict().items()
    }
    callbacks = Callbacks(trainer.callbacks, trainer, module).state_dict()
    return Result(weights, trainer.step, trainer.metrics, callbacks)
