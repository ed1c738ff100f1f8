"""The samples of a batch in parts, where a strategy makes them and not the feed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

#: Micro-batches a stage, where nothing is said: the more, the less the stages wait for each other.
_MICRO_BATCHES_A_STAGE = 4


def micro_batch_sizes(num_samples: int, most: int | None, num_stages: int) -> list[int]:
    """Samples of each micro-batch of a pipeline, the larger ones first.

    Stages have memory for one size at a time. Equal sizes keep them busier than two, as long as that does not
    take twice as many micro-batches or half of them.

    Args:
        num_samples: samples of the batch, at least 1.
        most: samples of a micro-batch at the most; None for some micro-batches a stage.
        num_stages: stages that they run through.
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


def rows(batch: Any, num_samples: int, low: int, high: int) -> Any:
    """The samples from `low` to `high` of a batch; what does not count samples is left whole.

    Args:
        batch: tensors whose first dimension is `num_samples`, and lists or tuples of as many plain values,
            such as names, in any containers.
        num_samples: samples of the batch.
        low: the first one that is wanted.
        high: the one after the last.
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
