"""Stage a state in host memory, which is reused for later saves.

A staged file has the layout of a rank's file on disk: archives in the format of
`torch.distributed.checkpoint`, each the output of `torch.save` for a piece of a tensor. The bytes around the
data depend only on type and shape, so they are generated once. A save only copies tensors to their positions,
and writes one contiguous range of memory.
"""

from __future__ import annotations

import math
import mmap
import struct
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, NamedTuple, cast

import torch
import xxhash

from hpctrain.checkpoint.format.dcp_format import StoredChunk, rank_file_name
from hpctrain.checkpoint.format.state_tree import STATE_KEY, rank_key, split_tree
from hpctrain.checkpoint.format.write_plan import WriteItem, item_bytes, plan_writes, slice_item
from hpctrain.checkpoint.io.coordination import RankCoordinator

#: Archives start at multiples of this value, to align their data for every type.
_ALIGNMENT = 64
_RECORD = b"archive/data/0"
#: Types of parameters and optimizer states that can be infinite or NaN.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Reserve for growth in later saves, such as more digits in the random state.
_SLACK_BYTES = 1 << 20
#: cudaHostRegisterPortable (CUDA Runtime API, memory management).
_PORTABLE = 1


class ByteRange(NamedTuple):
    offset: int
    length: int


class StagedFile:
    def __init__(self, items: Sequence[WriteItem]) -> None:
        self.items = tuple(items)
        self.spans: list[ByteRange] = []
        self.num_bytes = 0
        self._targets: list[torch.Tensor] = []
        for item in items:
            offset = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
            head, tail = _envelope(item.dtype, item.sizes)
            self.spans.append(ByteRange(offset, len(head) + item_bytes(item) + len(tail)))
            self.num_bytes = offset + self.spans[-1].length

    def bind_memory(self, memory: mmap.mmap) -> None:
        """Use `memory`, of at least `num_bytes` bytes, and write the bytes around the data into it."""
        self.content = memoryview(memory)[: self.num_bytes]
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        end = 0
        for item, span in zip(self.items, self.spans, strict=True):
            head, tail = _envelope(item.dtype, item.sizes)
            begin, stop = span.offset + len(head), span.offset + span.length - len(tail)
            self.content[end:begin] = bytes(span.offset - end) + head
            end = stop + len(tail)
            self.content[stop:end] = tail
            self._targets.append(everything[begin:stop].view(item.dtype).view(item.sizes))

    def chunks(self, rank: int) -> list[StoredChunk]:
        return [
            StoredChunk(
                item.key,
                str(item.dtype).removeprefix("torch."),
                item.tensor_shape,
                item.offsets,
                item.sizes,
                rank_file_name(rank),
                *span,
            )
            for item, span in zip(self.items, self.spans, strict=True)
        ]

    def fill(self, data: Sequence[torch.Tensor]) -> _CopyDone:
        """Queue copies of all data; `synchronize()` the result before reading the content."""
        begun = _record_events(data)
        if data:
            # A single call for all tensors, because a state may have thousands of small tensors.
            with torch.no_grad():
                torch._foreach_copy_(self._targets, list(data), non_blocking=True)
        return _CopyDone(begun, _record_events(data))

    def is_finite(self, checked: Callable[[str], bool]) -> bool:
        return all(
            math.isfinite(limit)
            for item, target in zip(self.items, self._targets, strict=True)
            if item.dtype in _FLOATS and target.numel() and checked(item.key)
            # The extremes take one pass without a copy; a NaN becomes both of them.
            for limit in torch.stack(target.aminmax()).tolist()
        )


def _record_events(data: Sequence[torch.Tensor]) -> list[Any]:
    events = []
    for gpu in sorted({source.device.index for source in data if source.is_cuda}):
        with torch.cuda.device(gpu):
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(gpu))
        events.append(event)
    return events


class _CopyDone:
    def __init__(self, begun: list[Any], events: list[Any]) -> None:
        self._begun, self._events = begun, events

    @property
    def seconds(self) -> float:
        """Duration of the copies from a GPU, after `synchronize`; 0 without GPUs."""
        pairs = zip(self._begun, self._events, strict=True)
        return max((begun.elapsed_time(ended) / 1e3 for begun, ended in pairs), default=0.0)

    @property
    def is_pending(self) -> bool:
        return bool(self._events)

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


def allocate_memory(num_bytes: int, gpu: torch.device | None) -> mmap.mmap:
    """Allocate memory with all pages touched, to avoid page faults in saves, and pinned if there is a GPU."""
    num_bytes += _SLACK_BYTES
    # Private, to avoid limits on shared memory. Not inherited by children: otherwise, after each fork, such
    # as of a data worker, the next save would copy every page.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with suppress(OSError):  # a kernel without huge pages rejects the hint
        memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).zero_()
    if gpu is not None:
        pin_memory(memory, gpu)
    return memory


def pin_memory(memory: mmap.mmap, gpu: torch.device) -> None:
    # Registered, because torch's own pinned memory is rounded up to powers of two. The current device of a
    # new thread is the first GPU, on which each rank of the node would otherwise create a context.
    with torch.cuda.device(gpu):
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, len(memory), _PORTABLE)))
    weakref.finalize(memory, runtime.cudaHostUnregister, address)


class _Envelope:
    """Stream for `torch.save` that stores the bytes before and after the tensor's data."""

    def __init__(self, num_bytes: int) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self._record_seen, self._left = False, num_bytes

    def write(self, block: Any) -> int:
        remaining = memoryview(block).cast("B")
        written = len(remaining)
        if not self._record_seen:
            self.head += remaining
            remaining = memoryview(self._split())
        skipped = min(self._left, len(remaining))
        self._left -= skipped
        self.tail += remaining[skipped:]
        return written

    def flush(self) -> None: ...

    def _split(self) -> bytes:
        """Move the bytes after the header of the data's record out of the head; none until it is complete."""
        at = self.head.find(_RECORD)
        if at < 0:
            return b""
        # The last two fields before the name in a local file header of a zip archive (APPNOTE.TXT, 4.3.7).
        name_length, extra_length = struct.unpack("<HH", self.head[at - 4 : at])
        begin = at + name_length + extra_length
        if len(self.head) < begin:
            return b""
        self._record_seen = True
        following = bytes(self.head[begin:])
        del self.head[begin:]
        return following


@cache
def _envelope(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes around a contiguous tensor in a `torch.save` file, without checksums of the data."""
    tensor = torch.empty(sizes, dtype=dtype)  # never touched, so it takes no memory
    stream = _Envelope(tensor.nbytes)
    with_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, cast(IO[bytes], stream))
    finally:
        torch.serialization.set_crc32_options(with_checksums)
    return bytes(stream.head), bytes(stream.tail)


@dataclass(frozen=True)
class StagedState:
    staged_file: StagedFile
    ready: Any
    """Object to `synchronize()` with before the image is read."""
    plain: Any
    fingerprint: str
    """Hash that is equal on ranks whose states have the same names, types and shapes."""


class _CachedPlan(NamedTuple):
    """Cached write plan of a state; computing the plan is slower than copying small tensors."""

    signatures: list[tuple[str, type, torch.Size, torch.dtype, torch.layout, bool]]
    """The properties that determine the plan of each tensor."""
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
        plain, items, data, fingerprint = self.plan(state, rank_state)
        self._join()
        if self._staged_file is None or self._staged_file.items != items:
            self._allocate(items, _gpu_of(data))
        staged_file = self._staged_file
        assert staged_file is not None
        return StagedState(staged_file, staged_file.fill(data), plain, fingerprint)

    def plan(
        self, state: Any, rank_state: Mapping[str, torch.Tensor]
    ) -> tuple[Any, tuple[WriteItem, ...], list[torch.Tensor], str]:
        """Return the state's plain values, the content of this rank's file, its data, a fingerprint."""
        plain, tensors = split_tree(state, STATE_KEY)
        prefix = rank_key(self._coordinator.rank)
        of_rank = {prefix + name: tensor for name, tensor in rank_state.items()}
        signatures = [
            (key, type(tensor), tensor.shape, tensor.dtype, tensor.layout, tensor.is_meta)
            for key, tensor in (*tensors.items(), *of_rank.items())
        ]
        cached, coordinator = self._cached_plan, self._coordinator
        if cached is not None and cached.signatures == signatures:
            everything = {**tensors, **of_rank}
            data = [slice_item(item, everything[item.key]) for item in cached.items]
            return plain, cached.items, data, cached.fingerprint
        writes = list(plan_writes(tensors, coordinator.rank, coordinator.world_size))
        writes += plan_writes(of_rank, 0, 1)
        items = tuple(item for item, _ in writes)
        common = ";".join(f"{key} {tuple(t.shape)} {t.dtype}" for key, t in tensors.items())
        fingerprint = xxhash.xxh3_64_hexdigest(common.encode())
        # The properties of a distributed tensor do not identify the local part.
        are_complete = all(kind in (torch.Tensor, torch.nn.Parameter) for _, kind, *_ in signatures)
        self._cached_plan = _CachedPlan(signatures, items, fingerprint) if are_complete else None
        return plain, items, [data for _, data in writes], fingerprint

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
