"""Staging of a state in host memory, which is reused for later saves."""

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
    staged_file: StagedFile
    ready: Any
    """Object to `synchronize()` with before the image is read."""
    plain: Any
    fingerprint: str
    """Hash that is equal on ranks whose states have the same names, types and shapes."""


#: The properties that determine the write plan of a tensor.
_TensorSignature = tuple[str, type, torch.Size, torch.dtype, torch.layout, bool]
#: Tensor types that are complete on each rank.
_UNSHARDED_TYPES = (torch.Tensor, torch.nn.Parameter)


def _signature_of(key: str, tensor: torch.Tensor) -> _TensorSignature:
    return key, type(tensor), tensor.shape, tensor.dtype, tensor.layout, tensor.is_meta


class _CachedPlan(NamedTuple):
    """Cached write plan of a state; computing the plan is slower than copying small tensors."""

    signatures: list[_TensorSignature]
    items: tuple[WriteItem, ...]
    fingerprint: str


class StateStager:
    """Capture of states, one at a time: each capture overwrites the previous capture."""

    def __init__(self, coordinator: RankCoordinator) -> None:
        self._coordinator = coordinator
        self._staged_file: StagedFile | None = None
        self._memory: mmap.mmap | None = None
        self._preparing: threading.Thread | None = None
        self._cached_plan: _CachedPlan | None = None

    def prepare(self, state: Any, rank_state: Mapping[str, torch.Tensor]) -> None:
        _, items, data, _ = self.plan(state, rank_state)
        self._join()
        if self._staged_file is not None and self._staged_file.items == items:
            return
        self._preparing = threading.Thread(
            target=self._allocate, args=(items, _gpu_of(data)), name="hpctrain-checkpoint-memory"
        )
        self._preparing.start()

    def stage(self, state: Any, rank_state: Mapping[str, torch.Tensor]) -> StagedState:
        plain, items, data, alike = self.plan(state, rank_state)
        self._join()
        if self._staged_file is None or self._staged_file.items != items:
            self._allocate(items, _gpu_of(data))
        staged_file = self._staged_file
        assert staged_file is not None
        return StagedState(staged_file, staged_file.fill(data), plain, alike)

    def plan(
        self, state: Any, rank_state: Mapping[str, torch.Tensor]
    ) -> tuple[Any, tuple[WriteItem, ...], list[torch.Tensor], str]:
        """Return the state's plain values, the content of this rank's file, its data, a fingerprint."""
        plain, tensors = split_tree(state, STATE_KEY)
        prefix = rank_key(self._coordinator.rank)
        of_rank = {prefix + name: tensor for name, tensor in rank_state.items()}
        looks = [_signature_of(key, tensor) for key, tensor in (*tensors.items(), *of_rank.items())]
        cached = self._cached_plan
        if cached is None or cached.signatures != looks:
            cached, data = self._plan_writes(tensors, of_rank, looks)
            # The properties of a distributed tensor do not identify the local part, so the plan is not
            # cached.
            are_plain = all(
                type(tensor) in _UNSHARDED_TYPES for tensor in (*tensors.values(), *of_rank.values())
            )
            self._cached_plan = cached if are_plain else None
        else:
            everything = {**tensors, **of_rank}
            data = [slice_item(item, everything[item.key]) for item in cached.items]
        return plain, cached.items, data, cached.fingerprint

    def _plan_writes(
        self,
        tensors: Mapping[str, torch.Tensor],
        of_rank: Mapping[str, torch.Tensor],
        looks: list[_TensorSignature],
    ) -> tuple[_CachedPlan, list[torch.Tensor]]:
        coordinator = self._coordinator
        writes = list(plan_writes(tensors, coordinator.rank, coordinator.world_size, coordinator.rank_of))
        writes += plan_writes(of_rank, 0, 1)
        common = ";".join(f"{key} {tuple(t.shape)} {t.dtype}" for key, t in tensors.items())
        alike = xxhash.xxh3_64_hexdigest(common.encode())
        return _CachedPlan(looks, tuple(item for item, _ in writes), alike), [data for _, data in writes]

    def _allocate(self, items: Sequence[WriteItem], gpu: torch.device | None) -> None:
        self._staged_file = None
        staged_file = StagedFile(items)
        if self._memory is None or len(self._memory) < staged_file.num_bytes:
            self._memory = None  # frees the old memory before the allocation of new memory
            self._memory = allocate_memory(staged_file.num_bytes, gpu)
        staged_file.bind_memory(self._memory)
        self._staged_file = staged_file

    def _join(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None


def _gpu_of(data: Sequence[torch.Tensor]) -> torch.device | None:
    return next((tensor.device for tensor in data if tensor.device.type == "cuda"), None)
