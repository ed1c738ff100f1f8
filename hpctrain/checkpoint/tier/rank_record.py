"""Record of a rank's last steps, in memory of the node that survives the process.

The next attempt needs the results that a killed rank had not yet sent to the others. Each step has a slot,
whose number is written last, so a kill leaves no partial slot that seems complete.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from hpctrain.files import own_file, read_regular

#: The ranks exchange their results at least every 16 steps, and read them one exchange later.
_NUM_SLOTS = 64
SLOT_BYTES = 4096
_HEADER = struct.Struct("<qq")
#: A rank may be two steps ahead of the slowest rank.
_NUM_COPIES = 3


class RankRecord:
    """Record of a rank, in a new file."""

    def __init__(self, path: Path, tensors: Sequence[torch.Tensor]) -> None:
        """Create the file at `path`.

        Args:
            path: the file, in a folder that only this user can enter.
            tensors: CPU tensors to copy with a step if they have changed, such as running means.

        Raises:
            OSError: the file cannot be created, or the file system is full.
        """
        self._path, self._tensors = path, list(tensors)
        self._copy_bytes = sum(_padded(tensor.nbytes) for tensor in tensors)
        size = _NUM_SLOTS * SLOT_BYTES + _NUM_COPIES * self._copy_bytes
        fd = own_file(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            # Without reserved memory, a write to the mapping could end the process with SIGBUS.
            os.posix_fallocate(fd, 0, size)
            self._memory = mmap.mmap(fd, size)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self._copies = [
            _views(self._memory, _copy_offset(i, self._copy_bytes), self._tensors) for i in range(_NUM_COPIES)
        ]

    def write(self, step: int, result: dict[str, Any], *, with_tensors: bool) -> None:
        """Write the result of a step, which replaces an old step. A result that is too long is omitted."""
        start = step % _NUM_SLOTS * SLOT_BYTES
        self._memory[start : start + 8] = b"\0" * 8
        if with_tensors and self._tensors:
            with torch.no_grad():
                torch._foreach_copy_(self._copies[step % _NUM_COPIES], self._tensors)
            result = {**result, "tensors": True}
        content = json.dumps(result).encode()
        if len(content) <= SLOT_BYTES - _HEADER.size:
            self._write(step, content)

    def read_slot(self, step: int) -> torch.Tensor:
        """Return a copy of the slot of a step, as a tensor of bytes with shape `(SLOT_BYTES,)`."""
        start = step % _NUM_SLOTS * SLOT_BYTES
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=SLOT_BYTES, offset=start).clone()

    def write_slot(self, content: bytes) -> None:
        """Write the content of a slot of another record. An empty slot is omitted."""
        step, length = _HEADER.unpack_from(content)
        if step > 0:
            self._write(step, content[_HEADER.size : _HEADER.size + length])

    def _write(self, step: int, content: bytes) -> None:
        start, memory = step % _NUM_SLOTS * SLOT_BYTES, self._memory
        memory[start : start + 8] = b"\0" * 8
        memory[start + _HEADER.size : start + _HEADER.size + len(content)] = content
        memory[start + 8 : start + 16] = len(content).to_bytes(8, "little")
        memory[start : start + 8] = step.to_bytes(8, "little")

    def clear(self) -> None:
        """Remove the results of all steps."""
        for start in range(0, _NUM_SLOTS * SLOT_BYTES, SLOT_BYTES):
            self._memory[start : start + 8] = b"\0" * 8

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def read_record(path: Path) -> dict[int, dict[str, Any]]:
    """Return the results in a record by step; empty if there is none."""
    try:
        content = read_regular(path)
    except OSError:
        return {}
    results = {}
    for start in range(0, min(len(content), _NUM_SLOTS * SLOT_BYTES), SLOT_BYTES):
        step, length = _HEADER.unpack_from(content, start)
        begin = start + _HEADER.size
        if step > 0:
            with suppress(ValueError):  # a damaged result is missing
                results[step] = json.loads(content[begin : begin + length])
    return results


def read_tensors(path: Path, step: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a step whose result has `tensors`, with the types and shapes of `like`.

    Raises:
        OSError: the record cannot be read.
    """
    content = bytearray(read_regular(path))
    copy_bytes = sum(_padded(tensor.nbytes) for tensor in like)
    return _views(content, _copy_offset(step % _NUM_COPIES, copy_bytes), like)


def _copy_offset(number: int, copy_bytes: int) -> int:
    return _NUM_SLOTS * SLOT_BYTES + number * copy_bytes


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def _views(memory: Any, offset: int, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    views = []
    for tensor in like:
        view = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        views.append(view.view(tensor.shape))
        offset += _padded(tensor.nbytes)
    return views
