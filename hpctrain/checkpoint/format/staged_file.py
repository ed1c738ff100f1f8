"""In-memory image of a rank's file, with the same layout as on disk.

The file is a sequence of archives in the format of `torch.distributed.checkpoint`: each archive is the output
of `torch.save` for a piece of a tensor. The bytes around the data depend only on type and shape, so these
bytes are generated once. A save then only copies tensors to their positions and writes one contiguous range
of memory.
"""

from __future__ import annotations

import math
import mmap
import struct
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, cast

import torch

from hpctrain.checkpoint.format.write_plan import WriteItem, item_bytes

#: Archives start at multiples of this value, to align their data for every type.
_ALIGNMENT = 64
_RECORD = b"archive/data/0"
#: Types of parameters and optimizer states that can be infinite or NaN.
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Reserve for growth in later saves, such as more digits in the random state.
_SLACK_BYTES = 1 << 20
#: cudaHostRegisterPortable (CUDA Runtime API, memory management).
_PORTABLE = 1


@dataclass(frozen=True)
class ByteRange:
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
