"""Distributed data parallelism: one process a device, gradients averaged while the backward pass runs."""

from __future__ import annotations

from hpctrain.training.strategies.replicas import Replicas


class DDP(Replicas):
    """Each rank takes its loss over its own share of the global batch."""

    has_algorithms = True
