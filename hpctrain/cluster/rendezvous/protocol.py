"""Messages between the ranks before they form a group: one JSON object per line.

First, both sides prove that they belong to the same job: with its secret (HPCTRAIN_SECRET) if set, otherwise
with ids that any user of the cluster can see. Later lines have an authentication code, which is checked
before parsing.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hpctrain.authentication import NONCE_LENGTH, code, read_secret
from hpctrain.cluster.host_name import host_name
from hpctrain.cluster.ranks import Ranks

#: Longer lines are rejected.
MAX_LINE_BYTES = 4096


def rendezvous_key(ranks: Ranks, environ: Mapping[str, str]) -> bytes:
    """Return the key that the ranks of a job share."""
    return code(read_secret(environ), "meeting", ranks.rendezvous_id, os.getuid())


def proof_of_rank_0(key: bytes, theirs: bytes, own: bytes) -> str:
    """Return rank 0's answer to the nonce `theirs`, which it sends with its `own` nonce."""
    return code(key, "rank 0", theirs, own).hex()


@dataclass(frozen=True)
class Handshake:
    """The introduction of a rank."""

    rank: int
    world_size: int
    host: str
    pid: int
    left_s: float = 0.0
    """Remaining seconds that this rank will wait."""
    reached: str = ""
    """Address of rank 0 for this rank."""
    nonce: str = field(default_factory=lambda: secrets.token_hex(8))
    """Distinguishes this process from others with the same rank."""

    @classmethod
    def of_this_process(cls, ranks: Ranks, environ: Mapping[str, str]) -> Handshake:
        """Return the introduction of this process."""
        return cls(ranks.rank, ranks.world_size, host_name(environ), os.getpid())

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Handshake | None:
        """Return the introduction in a message, or None if it is invalid."""
        names = [entry.name for entry in fields(cls)]
        if sorted(message) != sorted(names):
            return None
        handshake, sample = cls(**message), cls(0, 0, "", 0)
        if any(type(getattr(handshake, name)) is not type(getattr(sample, name)) for name in names):
            return None
        return (
            handshake
            if 0 <= handshake.rank < handshake.world_size and math.isfinite(handshake.left_s)
            else None
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


def encode_message(words: Mapping[str, Any]) -> bytes:
    """Encode a message as one line, without a code."""
    return json.dumps(dict(words)).encode("ascii") + b"\n"


def decode_message(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line, or None: any program may connect to a port."""
    try:
        words = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return words if isinstance(words, dict) else None


def read_nonce(words: Mapping[str, Any] | None) -> bytes | None:
    """Return the nonce of a peer, or None."""
    nonce = (words or {}).get("nonce")
    return (
        nonce.encode() if isinstance(nonce, str) and nonce.isascii() and len(nonce) == NONCE_LENGTH else None
    )
