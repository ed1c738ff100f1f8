"""Evaluation of a module without training: metric means over a data set, and predictions."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch

from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.training.data.batch_plan import DataRank
from hpctrain.training.data.dataset_adapters import make_validation_set
from hpctrain.training.data.loader_config import make_loader_config, map_tensors
from hpctrain.training.loop.validation import (
    eval_mode,
    evaluate_batches,
    pad_to_longest,
    run_validation,
)
from hpctrain.training.module import Module
from hpctrain.training.strategies import find_strategy
from hpctrain.training.trainer_config import TrainerConfig


class Evaluation:
    """Evaluation of one module in its strategy, on a data set shared among the ranks."""

    def __init__(
        self,
        settings: TrainerConfig,
        module: Module,
        context: DistributedContext,
        dataset: Any,
        environ: Mapping[str, str],
    ) -> None:
        """Put the module on its device. All ranks must call this.

        Raises:
            UserError: the data set is empty, or is not a usable data set.
        """
        strategy = find_strategy(settings.strategy, environ)
        self._data = make_validation_set(
            dataset,
            make_loader_config(settings, context),
            DataRank(context.ranks.rank, context.ranks.world_size),
            context,
            name="dataset",
        )
        self._strategy = strategy(module, context, settings)

    def means(self, method: str, lone_name: str) -> dict[str, float]:
        """Return the mean metrics; see `run_validation`. All ranks must call this."""
        means = run_validation(self._strategy, self._data, method=method, lone_name=lone_name)
        assert means is not None  # no stop flag was passed, so it cannot be interrupted
        return means

    def predictions(self) -> list[Any]:
        """Return the outputs of `predict_step` for all batches, in rank order. All ranks must call this."""
        own = []
        strategy, context = self._strategy, self._strategy.context
        with eval_mode(strategy.module), torch.no_grad(), closing(self._data.batches()) as mine:
            batches = pad_to_longest(mine, context) if strategy.in_lockstep else mine
            for output, _, num_held in evaluate_batches(strategy, "predict_step", batches):
                if num_held:
                    own.append(map_tensors(output, lambda tensor: tensor.cpu()))
        return [output for outputs in context.gather(own, "what predict_step returned") for output in outputs]

    def finish(self) -> None:
        """Restore the complete module on every rank. All ranks must call this."""
        self._strategy.finish()
