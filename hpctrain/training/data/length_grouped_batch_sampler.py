"""Batch sampler that groups samples of similar length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler

from hpctrain.errors import UserError

#: Number of batches whose samples are sorted together: more save padding, but make batches less random.
_BATCHES_PER_GROUP = 50


class LengthGroupedBatchSampler(Sampler[list[int]]):
    """Random batches of samples with similar lengths, which need little padding.

    Each sample occurs once per epoch.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        """Set up the groups.

        Args:
            lengths: length of each sample.
            batch_size: samples per batch; with the `Trainer`, of all ranks together.

        Raises:
            UserError: `batch_size` is less than 1.
        """
        if batch_size < 1:
            raise UserError(f"batch_size is {batch_size}, but must be at least 1.")
        self._lengths, self._batch_size = torch.as_tensor(lengths), batch_size

    def __len__(self) -> int:
        """Number of batches in an epoch."""
        return -(-len(self._lengths) // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        groups = torch.split(torch.randperm(len(self._lengths)), self._batch_size * _BATCHES_PER_GROUP)
        batches = [batch for group in groups for batch in torch.split(self._sort(group), self._batch_size)]
        for number in torch.randperm(len(batches)).tolist():
            yield batches[number].tolist()

    def _sort(self, samples: torch.Tensor) -> torch.Tensor:
        # An unstable sort orders samples of equal length differently on other CPUs.
        return samples[self._lengths[samples].argsort(descending=True, stable=True)]
