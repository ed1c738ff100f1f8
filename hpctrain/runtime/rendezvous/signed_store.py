"""A torch store whose values carry authentication codes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from torch.distributed import Store  # type: ignore[attr-defined]

from hpctrain.authentication import code, read_secret, seal, unseal
from hpctrain.errors import Unauthenticated


class SignedStore(Store):
    """A wrapper for a store without authentication.

    Each value has a code that covers the key, to prove that a process with the secret wrote it under this
    key. Prefixes of groups are part of the key. Counters (`add`) have no code. Entries can still be deleted,
    or replaced by older values of the same key.

    torch's C++ code calls the methods, some by their C++ names.
    """

    #: Keeps the Python part of stores alive that only C++ code references.
    _instances: ClassVar[list[SignedStore]] = []

    def __init__(self, store: Store, key: bytes) -> None:
        super().__init__()
        self._store: Any = store
        self._key = key
        self._instances.append(self)

    @classmethod
    def wrap(cls, store: Store, environ: Mapping[str, str]) -> SignedStore:
        """Wrap `store` for processes with the same secret in the same attempt."""
        # Without a supervisor, torchrun may restart the ranks with the same secret.
        return cls(store, code(read_secret(environ), "store", environ.get("TORCHELASTIC_RESTART_COUNT", "0")))

    def set(self, key: str, value: str | bytes) -> None:
        self._store.set(key, self._seal(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value and return it.

        Raises:
            Unauthenticated: the value was written by a process without the secret, or under another key.
        """
        return self._unseal(key, self._store.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """See base class. Raises like `get`."""
        old = self._seal(key, expected) if expected else b""
        return self._unseal(key, self._store.compare_set(key, old, self._seal(key, desired)))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """See base class. Raises like `get`."""
        return [
            self._unseal(key, sealed) for key, sealed in zip(keys, self._store.multi_get(keys), strict=True)
        ]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._store.check(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, *([] if timeout is None else [timeout]))

    def deleteKey(self, key: str) -> bool:  # noqa: N802
        return bool(self._store.delete_key(key))

    def getNumKeys(self) -> int:  # noqa: N802
        return int(self._store.num_keys())

    def clone(self) -> SignedStore:
        return SignedStore(self._store.clone(), self._key)

    def _seal(self, key: str, value: str | bytes) -> bytes:
        return seal(self._key, value.encode() if isinstance(value, str) else value, key)

    def _unseal(self, key: str, sealed: bytes) -> bytes:
        try:
            return unseal(self._key, sealed, key)
        except Unauthenticated:
            raise Unauthenticated(
                f"the store entry {key!r} was written by a process that does not have the secret of this run"
            ) from None
