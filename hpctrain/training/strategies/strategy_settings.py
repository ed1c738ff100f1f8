"""Checks of the settings by the strategy and the algorithm."""

from __future__ import annotations

from collections.abc import Mapping

from hpctrain.errors import UserError
from hpctrain.training.algorithms import find_algorithm
from hpctrain.training.algorithms.base import AllReduce
from hpctrain.training.strategies.strategy_registry import find_strategy, resolve_auto
from hpctrain.training.trainer_config import TrainerConfig


def resolve_strategy(settings: TrainerConfig, environ: Mapping[str, str]) -> None:
    """Replace the strategy "auto", and check all settings that depend on strategy and algorithm.

    Raises:
        UserError: a name is unknown, or a setting contradicts the strategy or the algorithm.
    """
    strategy = find_strategy(settings.strategy, environ)
    if settings.strategy == "auto":
        settings.strategy = resolve_auto(environ)
    strategy.check(settings)
    if settings.bucket_cap_mb is not None and not strategy.has_buckets:
        raise UserError(
            f"bucket_cap_mb is {settings.bucket_cap_mb!r}, but strategy is {settings.strategy!r}. "
            "bucket_cap_mb applies only to 'ddp', 'ddp_spawn', 'ddp2' and 'zero1'. Remove this setting."
        )
    if settings.static_graph and (not strategy.has_buckets or settings.find_unused_parameters):
        raise UserError(
            f"static_graph is True, but strategy is {settings.strategy!r} and find_unused_parameters is "
            f"{settings.find_unused_parameters}. static_graph requires strategy 'ddp', 'ddp_spawn', 'ddp2' "
            "or 'zero1', and find_unused_parameters=False."
        )
    algorithm = find_algorithm(settings.algorithm)
    if type(algorithm) is not AllReduce and not strategy.has_algorithms:
        raise UserError(
            f"algorithm is {settings.algorithm!r}, but strategy is {settings.strategy!r}. Communication "
            "algorithms work only with 'ddp' and 'ddp_spawn'. Use one of these, or remove algorithm."
        )
    algorithm.check(settings)
