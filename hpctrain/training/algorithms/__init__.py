"""Communication algorithms of `ddp`: ranks average gradients or weights with less communication."""

from hpctrain.training.algorithms.algorithm_registry import (
    BaguaStrategy,
    find_algorithm,
    register_algorithm,
)
from hpctrain.training.algorithms.base import Algorithm

__all__ = ["Algorithm", "BaguaStrategy", "find_algorithm", "register_algorithm"]
