"""Ports that every rank computes alike, without asking anybody."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import count

#: Below the range from which Linux hands out ports by itself (32768 and up), above the well-known ones.
FIRST_PORT, NUM_PORTS = 20_000, 12_000


def port_candidates(key: str) -> Iterator[int]:
    """An endless sequence of ports, the same wherever `key` is the same, and hardly ever the same elsewhere.

    `key` names a set of processes among all that may share a host: `Ranks.meeting_key`. The ports lie in
    `FIRST_PORT` … `FIRST_PORT + NUM_PORTS - 1`; one may come twice.
    """
    for attempt in count():
        text = f"{key}#{attempt}" if attempt else key
        yield FIRST_PORT + zlib.crc32(text.encode()) % NUM_PORTS
