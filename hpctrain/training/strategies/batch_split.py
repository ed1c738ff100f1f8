"""Splitting of batches into micro-batches by a strategy instead of the step source."""

from __future__ import annotations

from typing import Any

import torch

from hpctrain.torch_compat import pytree

#: Default number of micro-batches per stage: more micro-batches reduce the idle time of stages.
_MICRO_BATCHES_A_STAGE = 4


def pipeline_micro_batch_sizes(num_samples: int, most: int | None, num_stages: int) -> list[int]:
    """Return the number of samples of each micro-batch of a pipeline, in descending order.

    Stages allocate memory for one size at a time. Equal sizes are more efficient than two sizes, unless the
    number of micro-batches doubles or halves.
    """
    if most is None:
        wanted = min(_MICRO_BATCHES_A_STAGE * num_stages, num_samples)
        counts = range(wanted, wanted // 2, -1)
    else:
        least = -(-num_samples // most)
        counts = range(least, 2 * least)
    count = next((count for count in counts if num_samples % count == 0), counts[0])
    each, larger = divmod(num_samples, count)
    return [each + 1] * larger + [each] * (count - larger)


def slice_batch(batch: Any, num_samples: int, low: int, high: int) -> Any:
    """Return samples `low` to `high` of a batch; leaves without a sample dimension are unchanged.

    Args:
        batch: tensors whose first dimension is `num_samples`, and lists or tuples of as many plain values,
            such as names, in any containers.
        num_samples: samples of the batch.
        low: first sample.
        high: sample after the last.
    """

    def is_column(node: Any) -> bool:
        return (
            isinstance(node, (list, tuple))
            and len(node) == num_samples
            and not any(isinstance(each, (torch.Tensor, dict, list, tuple)) for each in node)
        )

    def cut(leaf: Any) -> Any:
        counts = (
            leaf.ndim > 0 and len(leaf) == num_samples if isinstance(leaf, torch.Tensor) else is_column(leaf)
        )
        return leaf[low:high] if counts else leaf

    return pytree.tree_map(cut, batch, is_leaf=is_column)
