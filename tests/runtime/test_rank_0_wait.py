import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed  # noqa: F401
from helpers.waiting import wait_for

from hpctrain.runtime.program import rank_0_wait
from hpctrain.runtime.program.rank_0_wait import wait_in_rendezvous


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def listener(monkeypatch):
    """A bound socket that does not listen yet, at the address of rank 0."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(bound.getsockname()[1]))
        yield bound


@pytest.fixture
def create(listener):
    """The handler of `env://`, which returns true if rank 0 listens when the store is created."""
    port = listener.getsockname()[1]
    module = SimpleNamespace(_rendezvous_handlers={"env": lambda _url, timeout: is_open(port)})
    wait_in_rendezvous(module)
    return lambda: module._rendezvous_handlers["env"]("env://", timeout=1)


def test_store_of_another_rank_is_created_when_rank_0_listens(listener, create, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    tried = []
    monkeypatch.setattr(rank_0_wait.time, "sleep", lambda _: tried.append(1))
    with ThreadPoolExecutor(1) as pool:
        created = pool.submit(create)
        wait_for(lambda: tried, 20, "the first attempt to connect")
        listener.listen()
    assert created.result()


def test_rank_0_does_not_wait_for_itself(create, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    assert not create()


@pytest.mark.parametrize("port", ["unknown", "999999", None])
def test_wait_ends_without_a_port(create, monkeypatch, port):
    monkeypatch.setattr(rank_0_wait, "_LIMIT_S", 0.1)
    monkeypatch.setenv("RANK", "1")
    if port is not None:
        monkeypatch.setenv("MASTER_PORT", port)
    assert not create()


def test_torch_has_the_handler():
    assert callable(sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers["env"])
