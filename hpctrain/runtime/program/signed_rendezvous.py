"""Sign the state that torchrun agents share, because torch unpickles it from an unauthenticated store."""

from __future__ import annotations

from importlib import import_module

from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, Token, create_handler

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
        state = self._backend.get_state()
        return None if state is None else (self._unseal(state[0]), state[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        current = self._backend.set_state(seal(self._secret, state, "rendezvous"), token)
        return None if current is None else (self._unseal(current[0]), *current[1:])

    def _unseal(self, sealed: bytes) -> bytes:
        try:
            return unseal(self._secret, sealed, "rendezvous")
        except Unauthenticated:
            raise ForgedState(
                f"the rendezvous state ({self.name}) was written by a process that does not have the "
                "secret of this run"
            ) from None


def register(backend: str, secret: bytes) -> str:
    """Register the signed form of a rendezvous backend that pickles, and return its name."""
    if backend not in _PICKLING:
        return backend

    def create(params: RendezvousParameters) -> RendezvousHandler:
        name = f"{backend.partition('-')[0]}_rendezvous_backend"
        module = import_module(f"torch.distributed.elastic.rendezvous.{name}")
        unsigned, store = module.create_backend(params)
        return create_handler(store, SignedBackend(unsigned, secret), params)

    rendezvous_handler_registry.register(f"hpctrain-{backend}", create)
    return f"hpctrain-{backend}"
