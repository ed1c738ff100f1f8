"""Read growing files: the data appended since the last read, and the last records."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Generic

from hpctrain.files import Record, decode_line, open_regular
from hpctrain.rundir import RunDir

_BLOCK_BYTES = 64 * 1024
#: Limit of a backward search: otherwise, a file without a matching record would be read completely.
_SEARCHED_BYTES = 64 * _BLOCK_BYTES


class FileTail:
    """Incremental reader of a text file. A missing file counts as empty."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path = path
        self._offset = self.line_start = offset
        """Position after the last newline that was read, in bytes."""
        # A multi-byte character may be split between two writes.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, end: int | None = None, *, most_bytes: int = _SEARCHED_BYTES) -> str:
        """Return the data appended since the last call, at most a few megabytes."""
        try:
            with open_regular(self._path) as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = self.line_start = 0
                file.seek(self._offset)
                size = most_bytes if end is None else min(most_bytes, end - self._offset)
                new = file.read(max(0, size))
        except FileNotFoundError:
            return ""
        if b"\n" in new:
            self.line_start = self._offset + new.rindex(b"\n") + 1
        self._offset += len(new)
        return self._decoder.decode(new)

    @property
    def position(self) -> int:
        """Position after the last character that was returned, in bytes."""
        return self._offset - len(self._decoder.getstate()[0])

    def has_grown(self) -> bool:
        """True if there is unread data. Checks only the length of the file."""
        try:
            return os.stat(self._path).st_size != self._offset
        except FileNotFoundError:
            return False

    def modified(self) -> float:
        try:
            return os.stat(self._path).st_mtime
        except FileNotFoundError:
            return 0.0


class RecordTail(Generic[Record]):
    """Incremental reader of a JSON Lines file."""

    def __init__(self, path: Path, kind: type[Record]) -> None:
        from hpctrain.record_types import decode

        self._path, self._decode, self._tail = path, partial(decode, kind=kind), FileTail(path)
        self._partial_line = ""

    def read(self) -> list[Record]:
        """Return the complete records appended since the last call."""
        return self._parse_lines(self._tail.read())

    def read_in_parts(self) -> Iterator[Record]:
        """Yield the same records, reading in blocks and closing the file between them."""
        while text := self._tail.read(most_bytes=_BLOCK_BYTES):
            yield from self._parse_lines(text)

    def _parse_lines(self, text: str) -> list[Record]:
        *lines, self._partial_line = (self._partial_line + text).split("\n")
        parsed = (decode_line(line.encode(), self._path, self._decode, ended=True) for line in lines)
        return [record for record in parsed if record is not None]


def read_last_records(
    path: Path, kind: type[Record], *, unless: bytes | None = None, whole: bool = False
) -> Iterator[Record]:
    """Yield the records of a JSON Lines file from last to first, without reading in advance."""
    from hpctrain.record_types import decode

    def parse(line: bytes, *, ended: bool) -> Record | None:
        if unless is not None and unless in line:
            return None
        return decode_line(line, path, partial(decode, kind=kind), ended=ended)

    try:
        file = open_regular(path)
    except FileNotFoundError:
        return
    with file:
        end = start = file.seek(0, os.SEEK_END)
        head, ended = b"", False  # Data after the last newline is an incomplete line.
        while start > 0 and (whole or end - start < _SEARCHED_BYTES):
            size = min(_BLOCK_BYTES, start)
            start -= size
            file.seek(start)
            head, *lines = (file.read(size) + head).split(b"\n")
            for line in reversed(lines):
                if (record := parse(line, ended=ended)) is not None:
                    yield record
                ended = True
        if start == 0 and (record := parse(head, ended=ended)) is not None:
            yield record


def output_range(
    run: RunDir, attempt: int, number: int = 0, log: Path | None = None
) -> tuple[int, int | None]:
    """Return the positions between which a log contains the output of an attempt; None if there is no end.

    All attempts of a batch script may write to one file, to which their logs are links. `RunDir.rank_logs`
    has the number and the path of `log`, by default that of rank 0.
    """
    log = log or run.rank_log(attempt, 0)
    if not (log.is_symlink() and log.exists()):
        return 0, None
    # Before the search for a later attempt, which has not started to write then. On NFS, `stat` may return an
    # outdated length.
    with open_regular(log) as file:
        end = file.seek(0, os.SEEK_END)
    for later in run.attempts():
        for n, (_, path) in run.rank_logs(later).items() if later > attempt else ():
            is_of_rank = path.name[:10] == log.name[:10]
            if is_of_rank and os.path.realpath(path) == os.path.realpath(log):
                return _length_before(run, attempt, number), min(end, _length_before(run, later, n))
    return _length_before(run, attempt, number), end


def _length_before(run: RunDir, attempt: int, number: int) -> int:
    from hpctrain.record_types import LogLength

    notes = RecordTail(run.log_index(attempt, number), LogLength).read_in_parts()
    return next((note.num_bytes for note in notes), 0)


def read_last_lines(
    path: Path, number: int, *, follow_links: bool = True, within: tuple[int, int | None] = (0, None)
) -> list[str]:
    """Return the last lines of a text file, or of a range of it; empty without a file."""
    try:
        with open_regular(path, follow_links=follow_links) as file:
            begin, end = within
            end = file.seek(0, os.SEEK_END) if end is None else end
            file.seek(max(begin, end - _BLOCK_BYTES))
            return file.read(max(0, end - file.tell())).decode(errors="replace").splitlines()[-number:]
    except (OSError, ValueError):  # A path with a NUL is a ValueError.
        return []
