"""Strategies: the division of work among the ranks. Strategy modules never import each other."""

from __future__ import annotations

from hpctrain.training.strategies.base import Strategy
from hpctrain.training.strategies.strategy_registry import STRATEGY_VARIABLE, find_strategy, register_strategy

__all__ = ["STRATEGY_VARIABLE", "Strategy", "find_strategy", "register_strategy"]
