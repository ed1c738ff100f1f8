"""Authenticate messages with the secret of an attempt.

The secret is in the environment of the ranks, which only processes of the run's owner can read, and is never
sent: a peer authenticates with a code over fresh nonces of both sides. An empty secret authenticates nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any

from hpctrain.errors import Unauthenticated
from hpctrain.files import parse_json_object

#: Environment variable of the secret. Set by the supervisor, or by the user for ranks without a supervisor.
SECRET_VARIABLE = "HPCTRAIN_SECRET"
#: Length of a nonce in a line of text, in bytes.
NONCE_LENGTH = 32


def new_secret() -> dict[str, str]:
    return {SECRET_VARIABLE: secrets.token_hex(32)}


def read_secret(environ: Mapping[str, str]) -> bytes:
    return environ.get(SECRET_VARIABLE, "").encode(errors="surrogateescape")


def new_nonce() -> bytes:
    """Return a random number for a single use, as hexadecimal digits."""
    return secrets.token_hex(NONCE_LENGTH // 2).encode()


def code(key: bytes, *fields: object) -> bytes:
    """Return the HMAC-SHA256 of `fields`: bytes, or objects that `str` represents exactly."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for field in fields:
        data = field if isinstance(field, bytes) else str(field).encode(errors="surrogateescape")
        mac.update(len(data).to_bytes(8, "big"))
        mac.update(data)
    return mac.digest()


def seal(key: bytes, content: bytes, *context: object) -> bytes:
    """Return `content` preceded by its code, which is valid only in `context`."""
    return b"%s %s" % (code(key, *context, content).hex().encode("ascii"), content)


def unseal(key: bytes, sealed: bytes, *context: object) -> bytes:
    """Return the content passed to `seal`."""
    content = sealed.partition(b" ")[2]
    if not hmac.compare_digest(sealed, seal(key, content, *context)):
        raise Unauthenticated("wrong or missing authentication code")
    return content


class Signed:
    """One direction of a connection: JSON lines, each with a code over its content and its number."""

    def __init__(self, key: bytes, *purpose: object) -> None:
        self._key, self._count = code(key, *purpose), 0

    def seal(self, message: Mapping[str, Any]) -> bytes:
        """Return the next line to send."""
        self._count += 1
        return seal(self._key, json.dumps(message).encode("ascii"), self._count) + b"\n"

    def open(self, line: bytes) -> dict[str, Any]:
        """Return the message in the next received line. The code is checked before parsing."""
        self._count += 1
        try:
            return parse_json_object(unseal(self._key, line.rstrip(b"\n"), self._count), "a received line")
        except ValueError as error:
            raise Unauthenticated(f"received a line that is not a JSON object: {error}") from None


def sign_connection(key: bytes, server_nonce: bytes, client_nonce: bytes) -> tuple[Signed, Signed]:
    """Return both directions of a connection; a valid line proves that its sender has the key."""
    up, down = (Signed(key, direction, server_nonce, client_nonce) for direction in ("up", "down"))
    return up, down
