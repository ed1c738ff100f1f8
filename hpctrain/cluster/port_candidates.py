"""Port candidates, computed identically on every rank without communication."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import count

#: Below Linux's ephemeral ports (32768 and up), above the well-known ones.
FIRST_PORT, NUM_PORTS = 20_000, 12_000


def port_candidates(key: str) -> Iterator[int]:
    """Yield an endless sequence of ports that depends only on `key`; different keys rarely yield equal ports.

    `key` identifies a set of processes among all that may share a host: `Ranks.rendezvous_id`. The ports are
    in `FIRST_PORT` … `FIRST_PORT + NUM_PORTS - 1`; a port may occur twice.
    """
    for attempt in count():
        text = f"{key}#{attempt}" if attempt else key
        yield FIRST_PORT + zlib.crc32(text.encode(errors="surrogateescape")) % NUM_PORTS
