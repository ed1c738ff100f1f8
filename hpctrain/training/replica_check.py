"""Compare the replicas of a training run: one slice of parameters and optimizer state per step.

Each rank hashes the same slice. The hash travels in the message that the ranks exchange after each step, so
the check needs no communication of its own. The sum over all ranks of an integer x and of its square shows if
all x are equal: only then is `num_ranks * sum(x²) == sum(x)²`. Buffers are excluded, because ranks may update
them from their own samples.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import xxhash
from torch.distributed.tensor import DTensor

from hpctrain.cluster.addresses import host_name
from hpctrain.errors import SilentCorruption, Suspect, describe_suspects
from hpctrain.runtime.distributed_context import DistributedContext
from hpctrain.text import pluralize
from hpctrain.training.base.device_selection import describe_hardware
from hpctrain.training.optim.optimizer_setup import parameters_of
from hpctrain.training.strategies import Strategy
from hpctrain.training.training_state import TrainingState

#: Numbers of the check in each message: two 16-bit pieces of the hash, and their squares.
NUMBERS_PER_MESSAGE = 4
#: Minimum size of a slice. Hashing a smaller slice would not take less time.
_MIN_SLICE_BYTES = {"cpu": 128 << 10, "cuda": 4 << 20}
#: Maximum number of integers that a GPU hashes at once; limits the memory for weights and products.
_BLOCK_SIZE = 1 << 20
#: Slices begin at multiples of this in each tensor.
_ALIGNMENT = 64
#: An odd number, so that multiplication by it, modulo 2**64, loses no bits.
_FACTOR = 0x1E3779B97F4A7C15
_LAYOUTS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)

#: A hash: a host number, or a number on a GPU, which is not waited for.
_Hash = int | torch.Tensor


class _Piece(NamedTuple):
    """A piece of a tensor, which is looked up again each time, because optimizers may replace it."""

    name: str
    holder: Mapping[Any, torch.Tensor]
    key: Any
    start: int
    stop: int

    def numbers(self) -> torch.Tensor:
        flat = _flatten(self.holder[self.key].detach())
        view = flat.view({1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32))
        return view[self.start // view.element_size() : self.stop // view.element_size()]


@dataclass
class _Slice:
    pieces: list[_Piece]
    verified_step: int
    """Last step after which the slice was equal on all ranks."""


class _SliceHash(NamedTuple):
    step: int
    slice: _Slice
    value: _Hash


class ReplicaCheck:
    """Comparison of the replicas; all methods are collective."""

    def __init__(self, context: DistributedContext, state: TrainingState, every: int) -> None:
        self._context, self._state, self._every = context, state, every
        if state.compared_step is None:
            state.compared_step = state.step
        self._slices: list[_Slice] = []
        self._sizes: list[int] = []
        self._recorded: list[_SliceHash] = []
        self._sent: list[_SliceHash] = []
        self._weights: torch.Tensor | None = None

    @classmethod
    def for_training(
        cls, context: DistributedContext, state: TrainingState, strategy: Strategy, every: int | None
    ) -> tuple[ReplicaCheck | None, str | None]:
        """Return the check and a remark; no check if it is off, or if the ranks' results may differ."""
        if every is None or not context.is_distributed or not strategy.has_equal_replicas:
            return None, None
        kind = describe_hardware(context.device)
        if context.device.type == "cpu":
            kind += f" and {pluralize(torch.get_num_threads(), 'thread')}"
        kinds = sorted(set(context.all_gather(kind)))
        if len(kinds) > 1:
            return None, (
                f"the replicas are not compared (replica_check_every={every}), because the ranks compute on "
                f"different hardware, which may round differently: {'; '.join(kinds)}"
            )
        return cls(context, state, every), None

    def reset(self) -> None:
        self._slices, self._sizes = [], []
        self._recorded, self._sent = [], []

    def add(self, step: int, *, whole: bool) -> None:
        """Hash the slice that is due after `step`, or the whole state."""
        if not self._slices:
            self._make_slices()
        count = len(self._slices)
        due = range((step - 1) * count // self._every, step * count // self._every)
        for index in range(count) if whole else due:
            state_slice = self._slices[index % count]
            self._recorded.append(_SliceHash(step, state_slice, self._hash(state_slice.pieces)))
        # Optimizers create and replace tensors, mostly in the first step.
        if whole or (due and due[-1] % count == count - 1):
            self._make_slices()

    def message(self) -> list[torch.Tensor | float]:
        """Return the numbers for the next message; their sums over all ranks are for `verify`."""
        self._sent, self._recorded = self._recorded, []
        if not self._sent:
            return [0.0] * NUMBERS_PER_MESSAGE
        total = _combine([record.value for record in self._sent])
        if isinstance(total, int):
            low, high = float(total >> 32 & 0xFFFF), float(total >> 48 & 0xFFFF)
            return [low, high, low * low, high * high]
        halves = torch.stack([total >> 32, total >> 48]).bitwise_and_(0xFFFF).double()
        return [torch.cat([halves, halves * halves])]

    def verify(self, sums: Sequence[float]) -> None:
        """Compare the replicas, from the sums of `message` over all ranks.

        Raises:
            SilentCorruption: on all ranks: the replicas differ.
        """
        low, high, low_squares, high_squares = map(int, sums)
        num_ranks = self._context.ranks.world_size
        if num_ranks * low_squares != low**2 or num_ranks * high_squares != high**2:
            raise self._find_difference()
        for record in self._sent:
            record.slice.verified_step = record.step
        if self._sent:
            self._state.compared_step = min(state_slice.verified_step for state_slice in self._slices)

    def _make_slices(self) -> None:
        tensors = list(self._tensors())
        sizes = [-(-holder[key].nbytes // _ALIGNMENT) * _ALIGNMENT for _, holder, key in tensors]
        min_bytes = _MIN_SLICE_BYTES.get(self._context.device.type, 4 << 20)
        count = max(1, min(self._every, sum(sizes) // min_bytes))
        slice_bytes = -(-sum(sizes) // (count * _ALIGNMENT)) * _ALIGNMENT
        slices: list[list[_Piece]] = [[] for _ in range(count)]
        offset = 0
        for (name, holder, key), size in zip(tensors, sizes, strict=True):
            start, num_bytes = 0, holder[key].nbytes
            max_bytes = _BLOCK_SIZE * min(4, holder[key].element_size())
            while start < num_bytes:
                index = (offset + start) // slice_bytes
                stop = min(num_bytes, (index + 1) * slice_bytes - offset, start + max_bytes)
                slices[index].append(_Piece(name, holder, key, start, stop))
                start = stop
            offset += size
        if sizes != self._sizes:
            self._sizes = sizes
            self._slices = [_Slice([], self._state.compared_step or 0) for _ in slices]
        for state_slice, pieces in zip(self._slices, slices, strict=True):
            state_slice.pieces = pieces

    def _tensors(self) -> Iterator[tuple[str, Mapping[Any, torch.Tensor], Any]]:
        parameters = dict(self._state.module.named_parameters())
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            if _is_complete(parameter):
                yield name, parameters, name
        for optimizer in self._state.optimizers:
            for tensor in parameters_of(optimizer):
                state = optimizer.state.get(tensor, {})
                for key in sorted(state, key=str):
                    if _is_complete(state[key]):
                        yield f"{key} of {names.get(tensor, 'a parameter')}", state, key

    def _hash(self, pieces: Sequence[_Piece]) -> _Hash:
        """Return an order-sensitive hash; does not wait for a GPU."""
        host = 0
        on_gpu: list[torch.Tensor] = []
        for piece in pieces:
            numbers = piece.numbers()
            if numbers.device.type == "cpu":
                host = xxhash.xxh3_64_intdigest(numbers.numpy().data, seed=host)
            else:
                on_gpu.append(numbers)
        return _combine([_signed(host), *self._hash_on_device(on_gpu)])

    def _hash_on_device(self, numbers: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield sums of integers with odd weights by position: a single flipped bit always changes them."""
        if numbers and self._weights is None:
            generator = torch.Generator().manual_seed(0)
            weights = torch.randint(-(2**63), 2**63 - 1, (_BLOCK_SIZE,), generator=generator)
            self._weights = weights.bitwise_or_(1).to(numbers[0].device)
        for block in _blocks(numbers):
            assert self._weights is not None
            yield (block * self._weights[: len(block)]).sum()

    def _find_difference(self) -> SilentCorruption:
        suspect = own_suspect(self._context)
        hashes = [int(record.value) for record in self._sent]
        gathered = self._context.all_gather([suspect.host, suspect.device, hashes])
        different = (i for i in range(len(hashes)) if len({rank[2][i] for rank in gathered}) > 1)
        # If all are equal, their sum or its message was wrong.
        number = next(different, len(hashes) - 1)
        record = self._sent[number]
        odd = _find_odd([rank[2][number] for rank in gathered])
        suspects = tuple(Suspect(rank, *gathered[rank][:2]) for rank in odd or range(len(gathered)))
        # The difference usually remains in the next steps, so the current state shows the tensors.
        pieces = record.slice.pieces
        current = self._context.all_gather([int(self._hash([piece])) for piece in pieces])
        hashes_of = zip(*current, strict=True)
        names = [piece.name for piece, values in zip(pieces, hashes_of, strict=True) if len({*values}) > 1]
        names = list(dict.fromkeys(names or [piece.name for piece in pieces]))
        text = ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")
        verified_step = self._state.verified_step or 0
        majority = f"{len(gathered) - len(odd)} of {len(gathered)} ranks agree, all except" if odd else None
        return SilentCorruption(
            f"After step {record.step}, {text} differed between the ranks. The last comparison that found "
            f"no difference was after step {record.slice.verified_step}. "
            f"{describe_suspects(majority, suspects, verified_step)}",
            suspects,
            verified_step,
        )


def _find_odd(values: Sequence[int]) -> list[int]:
    """Return the positions of the values that differ from the majority; empty if there is no majority."""
    counts = Counter(values).most_common(2)
    if counts[0][1] == 1 or counts[0][1] == counts[1][1]:
        return []
    return [position for position, value in enumerate(values) if value != counts[0][0]]


def _combine(values: Sequence[_Hash]) -> _Hash:
    total: _Hash = 0
    for value in values:
        total = (total + value) * _FACTOR
        total = _signed(total) if isinstance(total, int) else total
    return total


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def _blocks(numbers: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    block: list[torch.Tensor] = []
    for piece in numbers:
        if block and sum(map(len, block)) + len(piece) > _BLOCK_SIZE:
            yield torch.cat(block)
            block = []
        block.append(piece)
    if block:
        yield torch.cat(block)


def _is_complete(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and value.layout is torch.strided
        and not value.is_meta
    )


def _flatten(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of memory, without a copy if the tensor has no gaps."""
    if any(
        tensor.is_contiguous(memory_format=layout)
        for layout, dims in zip(_LAYOUTS, (tensor.dim(), 4, 5), strict=True)
        if tensor.dim() == dims
    ):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.flatten()


def own_suspect(context: DistributedContext) -> Suspect:
    rank, device = context.ranks.rank, f"CPU of rank {context.ranks.rank}"
    if context.device.type == "cuda":
        device = f"GPU-{torch.cuda.get_device_properties(context.device).uuid}"
    return Suspect(rank, host_name(os.environ), device)
