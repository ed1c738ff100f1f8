"""The file that a rank writes, laid out in memory exactly as it will lie on disk.

It is a row of archives, each what `torch.save` makes of one piece of a tensor: that is what
`torch.distributed.checkpoint` reads. What surrounds the data depends on its type and shape alone, so it is
made once; a save only copies tensors to their places, and writing it is writing one stretch of memory.
"""

from __future__ import annotations

import mmap
import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, cast

import torch

from hpctrain.checkpoint.shares import Piece, nbytes

#: The data of archives that begin at multiples of this is aligned for every type.
_ALIGNMENT = 64
_RECORD = b"archive/data/0"


@dataclass(frozen=True)
class Span:
    """Where in the file the archive of a piece lies, in bytes."""

    offset: int
    length: int


class Image:
    """The file of one rank, for pieces of given types and shapes."""

    def __init__(self, pieces: Sequence[Piece], *, pinned: bool) -> None:
        """Allocate all of it, and touch it, so that no save has to.

        Args:
            pieces: what the file holds.
            pinned: make the memory such that GPUs copy into it without waiting.
        """
        self.pieces = tuple(pieces)
        envelopes = [_envelope(piece.dtype, piece.sizes) for piece in pieces]
        self.spans: list[Span] = []
        end = 0
        for piece, (head, tail) in zip(pieces, envelopes, strict=True):
            offset = -(-end // _ALIGNMENT) * _ALIGNMENT
            self.spans.append(Span(offset, len(head) + nbytes(piece) + len(tail)))
            end = offset + self.spans[-1].length
        self.num_bytes = end
        memory = _allocate(max(1, end), pinned)
        self.content = memoryview(memory)[:end]
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        self._targets: list[torch.Tensor] = []
        for piece, span, (head, tail) in zip(pieces, self.spans, envelopes, strict=True):
            begin, stop = span.offset + len(head), span.offset + span.length - len(tail)
            self.content[span.offset : begin] = head
            self.content[stop : stop + len(tail)] = tail
            self._targets.append(everything[begin:stop].view(piece.dtype).view(piece.sizes))

    def fill(self, data: Sequence[torch.Tensor]) -> Any:
        """Copy the data of all pieces to their places.

        What is on a GPU is copied in the order of the current stream, and may still be under way on return.

        Returns:
            An event to `synchronize()` with before the content is read; None where all is copied.
        """
        with torch.no_grad():
            for target, source in zip(self._targets, data, strict=True):
                target.copy_(source, non_blocking=True)
        device = next((source.device for source in data if source.device.type == "cuda"), None)
        if device is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event


def _allocate(num_bytes: int, pinned: bool) -> mmap.mmap:
    # Private, so that no limit of shared memory counts. Children of this process do not get it: else each
    # fork, such as that of a data worker, would make every page of the next save a new one.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with _ignoring_refusal():
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    everything.zero_()
    if pinned:
        # Registered, since torch's own pinned memory comes in powers of two.
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = everything.data_ptr()
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, num_bytes, 0)))
        weakref.finalize(memory, runtime.cudaHostUnregister, address)
    return memory


@contextmanager
def _ignoring_refusal() -> Iterator[None]:
    """A kernel without huge pages refuses the hint, and nothing is lost by that."""
    try:
        yield
    except OSError:
        return


class _Envelope:
    """A stream for `torch.save` that keeps what comes before and after the tensor's data."""

    def __init__(self, num_bytes: int) -> None:
        self.head, self.tail = bytearray(), bytearray()
        self._found, self._left = False, num_bytes

    def write(self, block: Any) -> int:
        rest = memoryview(block).cast("B")
        written = len(rest)
        if not self._found:
            self.head += rest
            rest = memoryview(self._split())
        skipped = min(self._left, len(rest))
        self._left -= skipped
        self.tail += rest[skipped:]
        return written

    def flush(self) -> None:
        """Nothing is held back."""

    def _split(self) -> bytes:
        """Once the header of the data's record is there, take what follows it off the head."""
        at = self.head.find(_RECORD)
        if at < 0:
            return b""
        # The last two fields before the name in a local file header of a zip archive (APPNOTE.TXT, 4.3.7).
        name_length, extra_length = struct.unpack("<HH", self.head[at - 4 : at])
        begin = at + name_length + extra_length
        if len(self.head) < begin:
            return b""
        self._found = True
        rest = bytes(self.head[begin:])
        del self.head[begin:]
        return rest


@cache
def _envelope(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """What `torch.save` writes before and after the data of a contiguous tensor.

    Checksums inside the archive are left out, as torch allows, since they would depend on the data.
    """
    tensor = torch.empty(sizes, dtype=dtype)  # never touched: it takes up no memory
    stream = _Envelope(tensor.nbytes)
    with_checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensor, cast(IO[bytes], stream))
    finally:
        torch.serialization.set_crc32_options(with_checksums)
    return bytes(stream.head), bytes(stream.tail)
