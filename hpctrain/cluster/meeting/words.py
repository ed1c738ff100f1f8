"""What the ranks say to each other: one JSON object a line."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hpctrain.cluster.hosts import host_name
from hpctrain.cluster.ranks import Ranks

#: A longer line is none of ours.
MAX_LINE_BYTES = 4096


@dataclass(frozen=True)
class Hello:
    """How a rank introduces itself."""

    token: str
    """Says which job is meant: a server of another one does not answer it."""
    rank: int
    world_size: int
    host: str
    pid: int
    left_s: float = 0.0
    """Seconds that this rank is still going to wait."""
    reached: str = ""
    """The address at which it is knocking."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """Tells this process from any other that takes itself for the same rank."""

    @classmethod
    def of(cls, ranks: Ranks, environ: Mapping[str, str]) -> Hello:
        """The introduction of this process."""
        return cls(
            token=_digest(f"{ranks.meeting_key} of {os.getuid()}: who is there?"),
            rank=ranks.rank,
            world_size=ranks.world_size,
            host=host_name(environ),
            pid=os.getpid(),
        )

    @property
    def answer(self) -> str:
        """What only a rank 0 of the same job replies. Not the token: there are servers that echo."""
        return _digest(f"{self.token}: rank 0")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def encode(words: Hello | Mapping[str, Any]) -> bytes:
    """One line."""
    return json.dumps(asdict(words) if isinstance(words, Hello) else dict(words)).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The object in a line, or None where there is none: anybody may talk to a port."""
    try:
        words = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return words if isinstance(words, dict) else None


def decode_hello(line: bytes) -> Hello | None:
    """The introduction in a line, or None where it is none."""
    try:
        hello = Hello(**(decode(line) or {}))
    except TypeError:
        return None
    return (
        hello if all(isinstance(v, type(w)) for v, w in zip(_values(hello), _SAMPLE, strict=True)) else None
    )


def _values(hello: Hello) -> Iterable[Any]:
    return asdict(hello).values()


_SAMPLE = ("", 0, 0, "", 0, 0.0, "", "")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
