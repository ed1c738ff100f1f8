"""Copies a state into memory that is kept from save to save."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from hpctrain.checkpoint.agreement import Agreement
from hpctrain.checkpoint.image import Image, allocate
from hpctrain.checkpoint.shares import Piece, share
from hpctrain.checkpoint.tree import split_tree

#: What the keys of tensors begin with: those of the state, and those of one rank alone.
STATE_KEY = "state"


def rank_key(rank: int) -> str:
    """What the keys of a rank's own tensors begin with."""
    return f"rank-{rank:05d}/"


@dataclass(frozen=True)
class Captured:
    """A state as it was, which later steps do not change."""

    image: Image
    ready: Any
    """Something to `synchronize()` with before the image is read, or None."""
    plain: Any
    """The tree, with references in place of its tensors."""
    alike: str
    """Equal on ranks whose states have the same names, types and shapes."""


class Camera:
    """Captures states, one at a time: the next one overwrites the one before it."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._image: Image | None = None
        self._memory: mmap.mmap | None = None
        self._preparing: threading.Thread | None = None

    def prepare(self, state: Any, rank_state: Mapping[str, torch.Tensor]) -> None:
        """Allocate the memory in the background.

        Raises:
            CheckpointError: a value cannot be stored.
        """
        _, pieces, data, _ = self._look(state, rank_state)
        self._join()
        if self._image is not None and self._image.pieces == pieces:
            return
        self._preparing = threading.Thread(
            target=self._lay_out, args=(pieces, _gpu_of(data)), name="hpctrain-checkpoint-memory"
        )
        self._preparing.start()

    def capture(self, state: Any, rank_state: Mapping[str, torch.Tensor]) -> Captured:
        """Copy a state.

        Raises:
            CheckpointError: a value cannot be stored.
        """
        plain, pieces, data, alike = self._look(state, rank_state)
        self._join()
        if self._image is None or self._image.pieces != pieces:
            self._lay_out(pieces, _gpu_of(data))
        image = self._image
        assert image is not None
        return Captured(image, image.fill(data), plain, alike)

    def _look(
        self, state: Any, rank_state: Mapping[str, torch.Tensor]
    ) -> tuple[Any, tuple[Piece, ...], list[torch.Tensor], str]:
        agreement = self._agreement
        plain, tensors = split_tree(state, STATE_KEY)
        found = list(share(tensors, agreement.rank, agreement.world_size, agreement.rank_of))
        looks = ";".join(f"{key} {tuple(t.shape)} {t.dtype}" for key, t in tensors.items())
        alike = xxhash.xxh3_64_hexdigest(looks.encode())
        own = {rank_key(agreement.rank) + name: tensor for name, tensor in rank_state.items()}
        found += share(own, 0, 1)
        return plain, tuple(piece for piece, _ in found), [data for _, data in found], alike

    def _lay_out(self, pieces: Sequence[Piece], gpu: torch.device | None) -> None:
        """Make the image anew, in the same memory if that is enough."""
        self._image = None
        image = Image(pieces)
        if self._memory is None or len(self._memory) < image.num_bytes:
            self._memory = None  # so that the old memory goes before the new comes
            self._memory = allocate(image.num_bytes, gpu)
        image.lie_in(self._memory)
        self._image = image

    def _join(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None


def _gpu_of(data: Sequence[torch.Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in data if tensor.device.type == "cuda"), None)
