"""Training in a rank: data order, loop, strategies."""

from hpctrain.training.module import Module
from hpctrain.training.trainer import Trainer

__all__ = ["Module", "Trainer"]
