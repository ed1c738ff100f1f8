"""Staging of a state in host memory that is reused from save to save."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash

from hpctrain.checkpoint.format.staged_file import StagedFile, allocate_memory
from hpctrain.checkpoint.format.state_tree import STATE_KEY, rank_key, split_tree
from hpctrain.checkpoint.format.write_plan import WriteItem, plan_writes, slice_item
from hpctrain.checkpoint.io.coordination import RankCoordinator


@dataclass(frozen=True)
class StagedState:
    """A snapshot of a state, which later steps do not change."""

    image: StagedFile
    ready: Any
    """Object to `synchronize()` with before the image is read."""
    plain: Any
    """The state tree, with references in place of its tensors."""
    alike: str
    """Hash that is equal on ranks whose states have the same names, types and shapes."""


#: The properties that determine the write plan of a tensor.
_Look = tuple[str, type, torch.Size, torch.dtype, torch.layout, bool]
#: Tensor types of which each rank holds the whole.
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def _look_of(key: str, tensor: torch.Tensor) -> _Look:
    return key, type(tensor), tensor.shape, tensor.dtype, tensor.layout, tensor.is_meta


class _Known(NamedTuple):
    """Cached write plan of a state; computing it takes longer than copying small tensors."""

    looks: list[_Look]
    pieces: tuple[WriteItem, ...]
    alike: str


class StateStager:
    """Capture of states, one at a time: each capture overwrites the previous one."""

    def __init__(self, agreement: RankCoordinator) -> None:
        self._agreement = agreement
        self._image: StagedFile | None = None
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

    def capture(self, state: Any, rank_state: Mapping[str, torch.Tensor]) -> StagedState:
        """Copy the state into the staging memory.

        Raises:
            CheckpointError: a value cannot be stored.
        """
        plain, pieces, data, alike = self._look(state, rank_state)
        self._join()
        if self._image is None or self._image.pieces != pieces:
            self._lay_out(pieces, _gpu_of(data))
        image = self._image
        assert image is not None
        return StagedState(image, image.fill(data), plain, alike)

    def _look(
        self, state: Any, rank_state: Mapping[str, torch.Tensor]
    ) -> tuple[Any, tuple[WriteItem, ...], list[torch.Tensor], str]:
        plain, tensors = split_tree(state, STATE_KEY)
        prefix = rank_key(self._agreement.rank)
        own = {prefix + name: tensor for name, tensor in rank_state.items()}
        looks = [_look_of(key, tensor) for key, tensor in (*tensors.items(), *own.items())]
        known = self._known
        if known is None or known.looks != looks:
            known, data = self._share_out(tensors, own, looks)
            # The properties of a distributed tensor do not show which part this rank holds, so it is not
            # cached.
            are_plain = all(type(tensor) in _PLAIN for tensor in (*tensors.values(), *own.values()))
            self._known = known if are_plain else None
        else:
            everything = {**tensors, **own}
            data = [slice_item(piece, everything[piece.key]) for piece in known.pieces]
        return plain, known.pieces, data, known.alike

    def _share_out(
        self, tensors: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], looks: list[_Look]
    ) -> tuple[_Known, list[torch.Tensor]]:
        """Return the write plan of this rank, and the data for it."""
        agreement = self._agreement
        found = list(plan_writes(tensors, agreement.rank, agreement.world_size, agreement.rank_of))
        found += plan_writes(own, 0, 1)
        common = ";".join(f"{key} {tuple(t.shape)} {t.dtype}" for key, t in tensors.items())
        alike = xxhash.xxh3_64_hexdigest(common.encode())
        return _Known(looks, tuple(piece for piece, _ in found), alike), [data for _, data in found]

    def _lay_out(self, pieces: Sequence[WriteItem], gpu: torch.device | None) -> None:
        """Build a new image, in the existing memory if it is large enough."""
        self._image = None
        image = StagedFile(pieces)
        if self._memory is None or len(self._memory) < image.num_bytes:
            self._memory = None  # frees the old memory before the new is allocated
            self._memory = allocate_memory(image.num_bytes, gpu)
        image.lie_in(self._memory)
        self._image = image

    def _join(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None


def _gpu_of(data: Sequence[torch.Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in data if tensor.device.type == "cuda"), None)
