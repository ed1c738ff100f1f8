"""Rendezvous of torchrun agents, with an authentication code over their shared state.

torch unpickles this state from a store without authentication. Without the code, any program that reaches the
store could run code as the owner of the run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    Token,
    create_handler,
)

from hpctrain.authentication import seal, unseal
from hpctrain.errors import Unauthenticated

#: torch backends that pickle their state.
_PICKLING = ("c10d", "etcd-v2")


class ForgedState(Unauthenticated, RendezvousError):
    """The state was written by a process without the secret."""


class SignedBackend(RendezvousBackend):
    """A backend whose state carries an authentication code."""

    def __init__(self, backend: RendezvousBackend, secret: bytes) -> None:
        self._backend, self._secret = backend, secret

    @property
    def name(self) -> str:
        return f"hpctrain-{self._backend.name}"

    def get_state(self) -> tuple[bytes, Token] | None:
        """See base class."""
        found = self._backend.get_state()
        return None if found is None else (self._unseal(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        """See base class. Raises the same errors as `get_state`."""
        found = self._backend.set_state(seal(self._secret, state, "rendezvous"), token)
        return None if found is None else (self._unseal(found[0]), *found[1:])

    def _unseal(self, sealed: bytes) -> bytes:
        try:
            return unseal(self._secret, sealed, "rendezvous")
        except Unauthenticated:
            raise ForgedState(
                f"the rendezvous state ({self.name}) was written by a process that does not have the "
                "secret of this run"
            ) from None


def register(backend: str, secret: bytes) -> str:
    """Register the signed form of a rendezvous backend with torchrun, and return its name.

    A backend without pickling keeps its name.
    """
    if backend not in _PICKLING:
        return backend
    signed = f"hpctrain-{backend}"
    rendezvous_handler_registry.register(signed, _creator(backend, secret))
    return signed


def _creator(backend: str, secret: bytes) -> Callable[[RendezvousParameters], RendezvousHandler]:
    def create(params: RendezvousParameters) -> RendezvousHandler:
        create_backend: Any
        if backend == "c10d":
            from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
        else:
            from torch.distributed.elastic.rendezvous.etcd_rendezvous_backend import create_backend
        made, store = create_backend(params)
        return create_handler(store, SignedBackend(made, secret), params)

    return create
