"""How the ranks share the work. Siblings never import each other."""

from __future__ import annotations

from hpctrain.training.strategies.base import Strategy
from hpctrain.training.strategies.registry import STRATEGY_VARIABLE, find_strategy, register_strategy

__all__ = ["STRATEGY_VARIABLE", "Strategy", "find_strategy", "register_strategy"]
