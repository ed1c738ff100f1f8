"""Reading files that others append to: what is new since the last look, and the last records."""

from __future__ import annotations

import codecs
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpctrain.files import parse_json_line

_BLOCK_BYTES = 64 * 1024
#: More than this is not searched for a record: a file without one would be read to its start.
_SEARCHED_BYTES = 64 * _BLOCK_BYTES


class Tail:
    """Reads on in a text file where the last read stopped; a file that is not there yet is empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        # A character of several bytes may be written in two parts.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, end: int | None = None, *, most_bytes: int = _SEARCHED_BYTES) -> str:
        """What has been appended since the last call, at most a few megabytes of it.

        Args:
            end: do not read beyond this byte of the file.
            most_bytes: read no more than this at once.
        """
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                left = most_bytes if end is None else min(most_bytes, end - self._offset)
                new = file.read(max(0, left))
        except FileNotFoundError:
            return ""
        self._offset += len(new)
        return self._decoder.decode(new)

    def has_grown(self) -> bool:
        """Whether there is something to read; asks for the file's length only."""
        try:
            return os.stat(self._path).st_size != self._offset
        except FileNotFoundError:
            return False

    def modified(self) -> float:
        """When the file was last appended to, in seconds since the epoch; 0 where there is none."""
        try:
            return os.stat(self._path).st_mtime
        except FileNotFoundError:
            return 0.0


class RecordTail:
    """Reads on in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._tail = path, Tail(path)
        self._torn = ""

    def read(self) -> list[dict[str, Any]]:
        """The whole records that have been appended since the last call."""
        return self._take(self._tail.read())

    def read_in_parts(self) -> Iterator[dict[str, Any]]:
        """Yield the same, with only a part of the file in memory, and the file not open in between."""
        while text := self._tail.read(most_bytes=_BLOCK_BYTES):
            yield from self._take(text)

    def _take(self, text: str) -> list[dict[str, Any]]:
        *lines, self._torn = (self._torn + text).split("\n")
        parsed = (parse_json_line(line, self._path, ended=True) for line in lines)
        return [record for record in parsed if record is not None]


def last_records(path: Path, *, unless: bytes | None = None, whole: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines from the last to the first, without reading ahead.

    Args:
        path: the file; one that is not there has no records.
        unless: pass over lines that hold this; they are not even parsed.
        whole: look at all of it, and not only at the last few megabytes.
    """
    try:
        file = open(path, "rb")
    except FileNotFoundError:
        return
    with file:
        end = start = file.seek(0, os.SEEK_END)
        head, ended = b"", False  # What stands behind the last end of a line has none.
        while start > 0 and (whole or end - start < _SEARCHED_BYTES):
            size = min(_BLOCK_BYTES, start)
            start -= size
            file.seek(start)
            head, *lines = (file.read(size) + head).split(b"\n")
            for line in reversed(lines):
                if (record := _parse(line, path, unless, ended)) is not None:
                    yield record
                ended = True
        if start == 0 and (record := _parse(head, path, unless, ended)) is not None:
            yield record


def last_lines(path: Path, number: int) -> list[str]:
    """The last lines of a text file, of which only the end is read; none where there is no file."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BLOCK_BYTES))
            return file.read().decode(errors="replace").splitlines()[-number:]
    except OSError:
        return []


def _parse(line: bytes, path: Path, unless: bytes | None, ended: bool) -> dict[str, Any] | None:
    if unless is not None and unless in line:
        return None
    return parse_json_line(line.decode(errors="replace"), path, ended=ended)
