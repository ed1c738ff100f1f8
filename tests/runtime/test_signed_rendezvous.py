"""Signed rendezvous of torchrun agents. tests/e2e/test_torchrun.py runs them."""

import pickle
from base64 import b64encode
from pathlib import Path

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

from hpctrain.runtime.program.signed_rendezvous import ForgedState, SignedBackend, register

pytestmark = pytest.mark.ranks


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def test_forged_pickle_in_the_store_is_not_read(tmp_path):
    """Without the signature, torch would unpickle it in each agent."""
    store, secret = HashStore(), b"secret"
    signed = SignedBackend(C10dRendezvousBackend(store, "run"), secret)
    assert signed.get_state() is None
    state, token, has_set = signed.set_state(b"first")
    assert (state, has_set, signed.get_state()) == (b"first", True, (b"first", token))
    assert signed.set_state(b"second", token)[0] == b"second"
    assert signed.set_state(b"late", token) == (*signed.get_state(), False)
    store.set("torch.rendezvous.run", b64encode(pickle.dumps(Evil(tmp_path / "evil"))).decode())
    for operate in (signed.get_state, lambda: signed.set_state(b"third", token)):
        with pytest.raises(ForgedState):
            operate()
    assert not (tmp_path / "evil").exists()


def test_agents_use_the_signed_state_with_all_pickling_backends(tmp_path):
    assert register("etcd", b"") == "etcd"
    name = register("c10d", b"secret")
    params = RendezvousParameters(name, str(tmp_path / "store"), "run", 1, 1, store_type="file")
    params.config["endpoint"] = ""
    handler = rendezvous_handler_registry.create_handler(params)
    assert isinstance(handler._state_holder._backend, SignedBackend)
