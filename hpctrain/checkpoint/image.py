"""The file that a rank writes, laid out in memory exactly as it will lie on disk.

It is a row of archives, each what `torch.save` makes of one piece of a tensor: that is what
`torch.distributed.checkpoint` reads. What surrounds the data depends on its type and shape alone, so it is
made once; a save only copies tensors to their places, and writing it is writing one stretch of memory.
"""

from __future__ import annotations

import mmap
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import IO, Any, cast

import torch

from hpctrain.checkpoint.shares import Piece, nbytes

#: The data of archives that begin at multiples of this is aligned for every type.
_ALIGNMENT = 64
_RECORD = b"archive/data/0"
#: Room for what is longer in another save, such as the random state in its digits.
_SLACK_BYTES = 1 << 20
#: cudaHostRegisterPortable (CUDA Runtime API, memory management).
_PORTABLE = 1


@dataclass(frozen=True)
class Span:
    """Where in the file the archive of a piece lies, in bytes."""

    offset: int
    length: int


class Image:
    """The file of one rank, for pieces of given types and shapes."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        """Lay it out; `lie_in` gives it memory.

        Args:
            pieces: what the file holds.
        """
        self.pieces = tuple(pieces)
        self.spans: list[Span] = []
        self.num_bytes = 0
        self._targets: list[torch.Tensor] = []
        for piece in pieces:
            offset = -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT
            head, tail = _envelope(piece.dtype, piece.sizes)
            self.spans.append(Span(offset, len(head) + nbytes(piece) + len(tail)))
            self.num_bytes = offset + self.spans[-1].length

    def lie_in(self, memory: mmap.mmap) -> None:
        """Take `memory`, of `num_bytes` at the least, and write there what surrounds the data."""
        self.content = memoryview(memory)[: self.num_bytes]
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        end = 0
        for piece, span in zip(self.pieces, self.spans, strict=True):
            head, tail = _envelope(piece.dtype, piece.sizes)
            begin, stop = span.offset + len(head), span.offset + span.length - len(tail)
            self.content[end:begin] = bytes(span.offset - end) + head
            end = stop + len(tail)
            self.content[stop:end] = tail
            self._targets.append(everything[begin:stop].view(piece.dtype).view(piece.sizes))

    def fill(self, data: Sequence[torch.Tensor]) -> _Arrival:
        """Copy the data of all pieces to their places.

        What is on a GPU is copied in the order of the current stream, and may still be under way on return.

        Returns:
            Something to `synchronize()` with before the content is read.
        """
        if data:
            # In one call: a state may have thousands of small tensors.
            with torch.no_grad():
                torch._foreach_copy_(self._targets, list(data), non_blocking=True)
        return _Arrival({source.device for source in data if source.is_cuda})


class _Arrival:
    """The moment at which all that was copied from some GPUs has arrived."""

    def __init__(self, gpus: Iterable[torch.device]) -> None:
        self._events = []
        for gpu in gpus:
            with torch.cuda.device(gpu):
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(gpu))
            self._events.append(event)

    def synchronize(self) -> None:
        for event in self._events:
            event.synchronize()


def allocate(num_bytes: int, gpu: torch.device | None) -> mmap.mmap:
    """Memory for images, which is touched, so that no save has to.

    Args:
        num_bytes: how much.
        gpu: make it such that this GPU, and any other, copies into it without waiting.
    """
    num_bytes += _SLACK_BYTES
    # Private, so that no limit of shared memory counts. Children of this process do not get it: else each
    # fork, such as that of a data worker, would make every page of the next save a new one.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    with _ignoring_refusal():
        memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    everything.zero_()
    if gpu is not None:
        # Registered, since torch's own pinned memory comes in powers of two. In a thread of its own the first
        # GPU is the current one, where each rank of the node would open a context.
        with torch.cuda.device(gpu):
            runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            address = everything.data_ptr()
            torch.cuda.check_error(int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE)))
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
