"""Compare two checkpoints, written by any number of ranks, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from hpctrain.checkpoint.format.dcp_format import TensorReader
from hpctrain.checkpoint.format.manifest import STATE_NAME, TENSORS_NAME, Manifest
from hpctrain.checkpoint.format.state_tree import STATE_KEY
from hpctrain.errors import CorruptCheckpoint
from hpctrain.files import read_regular
from hpctrain.torch_compat import load_tensors

#: Groups of the state, in the order of the comparison; other groups follow.
_GROUPS = ("module", "optimizers", "schedulers")
#: Stands for a value that only the other checkpoint has.
MISSING = "(missing)"
#: Stands for a tensor whose file is damaged.
UNREADABLE = "(unreadable)"


@dataclass(frozen=True)
class StateDifference:
    name: str
    recorded: Any
    here: Any
    index: tuple[int, ...] | None = None
    """Index of the first differing element of a tensor."""
    num_different: int = 0
    num_elements: int = 0
    rank: int | None = None
    bit: int | None = None
    """The only differing bit of the tensor, counted from the least significant bit of the element."""


@dataclass
class StateComparison:
    num_tensors: int = 0
    num_bytes: int = 0
    num_values: int = 0
    differences: list[StateDifference] = field(default_factory=list)


def compare_checkpoints(recorded: Path, here: Path, *, ignored: Collection[str] = ()) -> StateComparison:
    """Compare two folders bit by bit, one tensor at a time, without verifying checksums."""
    ours, theirs = _StoredState(recorded), _StoredState(here)
    result = StateComparison()
    prefixes = [STATE_KEY] + ["rank-"] * (ours.world_size == theirs.world_size)
    skipped = tuple(f"{STATE_KEY}/{name}" for name in ignored)
    for key in sorted({*ours.table, *theirs.table}, key=lambda key: (_group(key), ours.order(key))):
        if key.startswith(tuple(prefixes)) and not key.startswith(skipped):
            result.num_tensors += 1
            result.num_bytes += ours.num_bytes(key)
            if (difference := _compare_tensor(key, ours, theirs)) is not None:
                result.differences.append(difference)
    our_values, their_values = (
        {k: v for k, v in state.plain.items() if k not in ignored} for state in (ours, theirs)
    )
    for name, our_value, their_value in _compare_values("", our_values, their_values, result):
        result.differences.append(StateDifference(name, our_value, their_value))
    return result


class _StoredState:
    def __init__(self, folder: Path) -> None:
        try:
            self.world_size = Manifest.read(folder).world_size
            self.plain: dict[str, Any] = json.loads(read_regular(folder / STATE_NAME))
            self.table: dict[str, Any] = json.loads(read_regular(folder / TENSORS_NAME))
            self.reader = TensorReader(folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CorruptCheckpoint(f"{folder} cannot be read: {error}") from error
        self._order = {key: i for i, key in enumerate(self.table)}

    def order(self, key: str) -> int:
        return self._order.get(key, len(self._order))

    def num_bytes(self, key: str) -> int:
        return self.reader.empty(key).nbytes if key in self.table else 0

    def load(self, key: str) -> torch.Tensor:
        tensors = {key: self.reader.empty(key)}
        try:
            load_tensors(tensors, self.reader)
        # torch's exception is no subclass of `Exception`.
        except (Exception, CheckpointException) as error:
            raise CorruptCheckpoint(f"{_name(key)} in {self.reader.path} cannot be read: {error}") from error
        return tensors[key]

    def rank_of(self, key: str, index: tuple[int, ...]) -> int | None:
        for offsets, sizes, file, *_ in self.table[key]["pieces"]:
            if all(low <= i < low + size for i, low, size in zip(index, offsets, sizes, strict=True)):
                return int(str(file).removeprefix("__").partition("_")[0])
        return None


def _compare_tensor(key: str, ours: _StoredState, theirs: _StoredState) -> StateDifference | None:
    name = _name(key)
    kind, other_kind = _kind(key, ours), _kind(key, theirs)
    if kind != other_kind:
        return StateDifference(name, kind, other_kind)
    loaded: list[torch.Tensor | None] = []
    for state in (ours, theirs):
        try:
            loaded.append(state.load(key).contiguous())
        except CorruptCheckpoint:
            loaded.append(None)
    ours_loaded, theirs_loaded = loaded
    if ours_loaded is None or theirs_loaded is None:
        values = ["readable" if tensor is not None else UNREADABLE for tensor in loaded]
        return StateDifference(name, values[0], values[1])
    size = max(1, ours_loaded.element_size())
    # Bits, because a NaN differs from itself and -0 equals 0.
    bits = ours_loaded.reshape(-1).view(torch.uint8) ^ theirs_loaded.reshape(-1).view(torch.uint8)
    if not bits.any():
        return None
    elements = bits.reshape(-1, size).any(dim=1).nonzero().flatten()
    position = int(elements[0])
    index = (
        tuple(int(i) for i in torch.unravel_index(elements[0], ours_loaded.shape))
        if ours_loaded.dim()
        else ()
    )
    changed = bits[position * size : (position + 1) * size].tolist()
    pattern = sum(byte << (8 * i) for i, byte in enumerate(changed))
    single = len(elements) == 1 and pattern.bit_count() == 1
    return StateDifference(
        name,
        ours_loaded.reshape(-1)[position].item(),
        theirs_loaded.reshape(-1)[position].item(),
        index,
        len(elements),
        ours_loaded.numel(),
        ours.rank_of(key, index),
        pattern.bit_length() - 1 if single else None,
    )


def _kind(key: str, state: _StoredState) -> str:
    entry = state.table.get(key)
    return MISSING if entry is None else f"{entry['dtype']} of shape {list(entry['size'])}"


def _compare_values(
    name: str, ours: Any, theirs: Any, result: StateComparison
) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        for key in {**ours, **theirs}:
            yield from _compare_values(
                f"{name}/{key}" if name else key, ours.get(key, MISSING), theirs.get(key, MISSING), result
            )
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, pair in enumerate(zip(ours, theirs, strict=True)):
            yield from _compare_values(f"{name}/{i}", *pair, result)
    else:
        result.num_values += 1
        # As text, because a NaN differs from itself.
        if json.dumps(ours) != json.dumps(theirs):
            yield name, ours, theirs


def _name(key: str) -> str:
    return key.removeprefix(f"{STATE_KEY}/")


def _group(key: str) -> int:
    group = _name(key).partition("/")[0]
    return _GROUPS.index(group) if group in _GROUPS else len(_GROUPS)
