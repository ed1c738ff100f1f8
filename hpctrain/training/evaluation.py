"""A module that is not trained: its means over a data set, and what it predicts."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Any

import torch

from hpctrain.runtime.process_group import Team
from hpctrain.training.data.loading import loading_of, to_device, with_tensors
from hpctrain.training.data.lockstep import in_lockstep
from hpctrain.training.data.plan import Deal
from hpctrain.training.data.sources import make_validation_set
from hpctrain.training.module import Module
from hpctrain.training.precision import batch_in_precision, forward_context
from hpctrain.training.settings import Settings
from hpctrain.training.strategies import find_strategy
from hpctrain.training.validation import evaluating, validate


class Evaluation:
    """A module in its strategy, and a data set of which each rank has a part."""

    def __init__(
        self, settings: Settings, module: Module, team: Team, dataset: Any, environ: Mapping[str, str]
    ) -> None:
        """Put the module on its device. All ranks must call this.

        Raises:
            UserError: the data set is empty, or cannot be one.
        """
        self._team, self._precision = team, settings.precision
        strategy = find_strategy(settings.strategy, environ)
        self._data = make_validation_set(
            dataset,
            loading_of(settings, team),
            Deal(team.ranks.rank, team.ranks.world_size),
            team,
            seed=settings.seed,
            global_batch_size=settings.global_batch_size,
            name="dataset",
        )
        self._strategy = strategy(module, team, settings)

    def means(self, method: str, lone_name: str) -> dict[str, float]:
        """See `validate`. All ranks must call this."""
        means = validate(
            self._strategy,
            self._data,
            self._team,
            precision=self._precision,
            method=method,
            lone_name=lone_name,
        )
        assert means is not None  # nothing was to interrupt it
        return means

    def predictions(self) -> list[Any]:
        """What `predict_step` returns for all batches, in order of ranks. All ranks must call this."""
        own = []
        team, strategy = self._team, self._strategy
        with evaluating(strategy.module), torch.no_grad(), closing(self._data.batches()) as mine:
            batches = in_lockstep(mine, team) if strategy.in_lockstep else mine
            for batch_idx, (num_held, batch) in enumerate(batches):
                with forward_context(self._precision, team.device):
                    on_device = batch_in_precision(to_device(batch, team.device), self._precision)
                    output, _ = strategy.evaluation_step("predict_step", on_device, batch_idx, num_held)
                if num_held:
                    own.append(with_tensors(output, lambda tensor: tensor.cpu()))
        return [output for outputs in team.gather(own) for output in outputs]

    def finish(self) -> None:
        """Leave the module whole. All ranks must call this."""
        self._strategy.finish()
