"""How the ranks of `ddp` agree, on gradients or now and then on weights, with fewer bytes."""

from hpctrain.training.algorithms.base import Algorithm
from hpctrain.training.algorithms.registry import find_algorithm, register_algorithm

__all__ = ["Algorithm", "find_algorithm", "register_algorithm"]
