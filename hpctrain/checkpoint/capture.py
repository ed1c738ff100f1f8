"""Copies a state into memory that is kept from save to save."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from hpctrain.checkpoint.agreement import Agreement
from hpctrain.checkpoint.image import Image, allocate
from hpctrain.checkpoint.shares import Piece, cut_out, share
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
    """Something to `synchronize()` with before the image is read."""
    plain: Any
    """The tree, with references in place of its tensors."""
    alike: str
    """Equal on ranks whose states have the same names, types and shapes."""


#: What tells how a tensor is shared out: its key, and the rest of its looks.
_Look = tuple[str, type, torch.Size, torch.dtype, torch.layout, bool]
#: Types of tensors that each rank holds whole.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _look_of(key: str, tensor: torch.Tensor) -> _Look:
    return key, type(tensor), tensor.shape, tensor.dtype, tensor.layout, tensor.is_meta


class _Known(NamedTuple):
    """How a state of such looks is shared out: working that out takes longer than copying small tensors."""

    looks: list[_Look]
    pieces: tuple[Piece, ...]
    alike: str


class Camera:
    """Captures states, one at a time: the next one overwrites the one before it."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._image: Image | None = None
        self._memory: mmap.mmap | None = None
        self._preparing: threading.Thread | None = None
        self._known: _Known | None = None

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
        plain, tensors = split_tree(state, STATE_KEY)
        prefix = rank_key(self._agreement.rank)
        own = {prefix + name: tensor for name, tensor in rank_state.items()}
        looks = [_look_of(key, tensor) for key, tensor in (*tensors.items(), *own.items())]
        known = self._known
        if known is None or known.looks != looks:
            known, data = self._share_out(tensors, own, looks)
            # Which part of a distributed tensor is ours is not told by its looks.
            are_plain = all(type(tensor) in _PLAIN for tensor in (*tensors.values(), *own.values()))
            self._known = known if are_plain else None
        else:
            everything = {**tensors, **own}
            data = [cut_out(piece, everything[piece.key]) for piece in known.pieces]
        return plain, known.pieces, data, known.alike

    def _share_out(
        self, tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], looks: list[_Look]
    ) -> tuple[_Known, list[torch.Tensor]]:
        """Work out what this rank writes of a state that looks so, and its data."""
        agreement = self._agreement
        found = list(share(tensors, agreement.rank, agreement.world_size, agreement.rank_of))
        found += share(own, 0, 1)
        common = ";".join(f"{key} {tuple(t.shape)} {t.dtype}" for key, t in tensors.items())
        alike = xxhash.xxh3_64_hexdigest(common.encode())
        return _Known(looks, tuple(piece for piece, _ in found), alike), [data for _, data in found]

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
