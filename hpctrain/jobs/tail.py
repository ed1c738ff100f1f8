"""Reading files that others append to: what is new since the last look, and the last records."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

    def read(self) -> str:
        """What has been appended since the last call, at most a few megabytes of it."""
        try:
            with open(self._path, "rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0
                file.seek(self._offset)
                new = file.read(_SEARCHED_BYTES)
        except FileNotFoundError:
            return ""
        self._offset += len(new)
        return self._decoder.decode(new)


class RecordTail:
    """Reads on in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._tail = Tail(path)
        self._torn = ""

    def read(self) -> list[dict[str, Any]]:
        """The whole records that have been appended since the last call."""
        *lines, self._torn = (self._torn + self._tail.read()).split("\n")
        return [record for line in lines if (record := _parse(line)) is not None]


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
        head = b""
        while start > 0 and (whole or end - start < _SEARCHED_BYTES):
            size = min(_BLOCK_BYTES, start)
            start -= size
            file.seek(start)
            head, *lines = (file.read(size) + head).split(b"\n")
            for line in reversed(lines):
                if (unless is None or unless not in line) and (record := _parse(line)) is not None:
                    yield record
        if start == 0 and (unless is None or unless not in head) and (record := _parse(head)) is not None:
            yield record


def _parse(line: str | bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
