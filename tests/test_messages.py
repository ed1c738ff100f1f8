"""Messages between ranks: accepted and refused ones."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_on_ranks

from hpctrain import detect, messages
from hpctrain.errors import HpctrainError, Unauthenticated, UserError
from hpctrain.runtime.device_assignment import assign_device
from hpctrain.runtime.distributed_context import DistributedContext, init_distributed
from hpctrain.runtime.rendezvous.signed_store import SignedStore

pytestmark = pytest.mark.ranks


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.path,)


def rank() -> int:
    return int(os.environ["RANK"])


def join(secret: str = "shared") -> DistributedContext:
    return init_distributed(detect(os.environ), {**os.environ, "HPCTRAIN_SECRET": secret})


def tcp_store() -> dist.TCPStore:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def signed_store() -> SignedStore:
    return SignedStore.wrap(tcp_store(), {**os.environ, "HPCTRAIN_SECRET": "shared"})


def error_of(action: Callable[[], object]) -> str:
    """Return type and message of the error that an action raises on this rank; an empty string if none."""
    try:
        action()
    except (HpctrainError, RuntimeError) as error:
        return f"{type(error).__name__} {error}"
    return ""


def error_on_rank_0(function: Callable[..., str], *arguments: object) -> str:
    """Call a function on two ranks that join by themselves; rank 1 may fail in any way."""
    return run_on_ranks(function, *arguments, group=False)[0]


def values() -> dict:
    return {
        "plain": (1, 2.5, float("inf"), None, True, "ü\ud800", -(10**30)),
        7: [{(1, 2): torch.float16}, [], {}, ()],
        "tensors": [torch.arange(3, dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 2)],
        "transposed": torch.arange(6).reshape(2, 3).T,
        "complex": torch.tensor([1 + 2j]),
        "array": np.arange(6, dtype=">i4").astype("i4").reshape(2, 3)[:, ::-2],
        "number": np.float32(2.5),
        "bytes": [b"abc", b""],
    }


def is_same(actual: object, expected: object) -> bool:
    if isinstance(expected, torch.Tensor | np.ndarray):
        return (
            type(actual) is type(expected)
            and actual.dtype == expected.dtype
            and actual.shape == expected.shape
            and bool((actual == expected).all())
        )
    if isinstance(expected, dict):
        return list(actual) == list(expected) and all(is_same(actual[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return (
            len(actual) == len(expected)
            and all(map(is_same, actual, expected))
            and type(actual) is type(expected)
        )
    return actual == expected and type(actual) is type(expected)


def exchange_values() -> None:
    context = join()
    both = [{"rank": 0, **values()}, {"rank": 1, **values()}]
    assert is_same(context.all_gather(both[rank()]), both)
    assert is_same(context.broadcast(both[rank()], 1), both[1])
    assert context.broadcast_from_main(rank()) == 0
    group = messages.new_group([0, 1], backend="gloo")
    assert messages.gather(group, rank(), to=0) == ([0, 1] if rank() == 0 else [None, None])
    if rank() == 0:
        assert_signed(signed_store(), group.group_name)


def assert_signed(store: SignedStore, group: str) -> None:
    """Fail if the store has unsigned entries other than counters."""
    content = {key: store._store.get(key) for key in store._store.list_keys()}
    signed = [key for key, value in content.items() if key.startswith("hpctrain/") and not value.isdigit()]
    assert all(store.get(key) for key in signed)
    for name in ("0", group):
        assert any(f"/{name}//cpu//" in key for key in signed), (name, content)


def test_values_arrive_unchanged_and_the_store_is_signed():
    run_on_ranks(exchange_values, group=False)


def send_unsupported_values() -> None:
    context = join()
    for bad in ({1}, Path("x"), Evil(Path("x")), type("Sub", (dict,), {})()):
        expected = rf"the result of predict_step cannot be sent .*\.{type(bad).__name__}\."
        with pytest.raises(UserError, match=expected):
            context.all_gather(bad if rank() == 1 else 1, "the result of predict_step")
    messages.MAX_MESSAGE_BYTES = 300
    with pytest.raises(
        UserError, match="a message is 428 bytes long on one rank, but the limit is 300 bytes"
    ):
        context.all_gather("x" * 400 if rank() == 1 else "")


def test_unsupported_and_too_large_values_are_refused_on_all_ranks():
    run_on_ranks(send_unsupported_values, group=False)


def join_with_own_secret() -> str:
    return error_of(lambda: join(f"of {rank()}"))


def test_rank_with_another_secret_is_reported_with_the_store_and_its_connections():
    error = error_on_rank_0(join_with_own_secret)
    assert error.startswith("Unauthenticated the store entry 'hpctrain/0/devices/seats/")
    assert "store at 127.0.0.1:" in error


def join_without_group_secret() -> str:
    """Rank 1 has the secret of the store, but not that of the group."""
    if rank() == 0:
        return error_of(join)
    store = signed_store()
    assign_device(detect(os.environ), os.environ, dist.PrefixStore("hpctrain/0/devices", store))
    dist.init_process_group("gloo", store=dist.PrefixStore("hpctrain/0", store), rank=1, world_size=2)
    return error_of(lambda: messages.prove_world(b"a guess"))


def test_program_in_place_of_a_rank_is_detected():
    error = error_on_rank_0(join_without_group_secret)
    assert error.startswith(
        "Unauthenticated rank 1 of 2 did not authenticate with the secret of this run: another program"
    )
    assert "store at 127.0.0.1:" in error


def join_with_changed_address() -> str:
    """Rank 0 changes the address of rank 1's gloo in the store before it reads it."""
    init_process_group = dist.init_process_group

    def change_and_init(*args, **kwargs):
        store, key = tcp_store(), "hpctrain/0/0//cpu//0/1"
        value = store.get(key)
        content = value.partition(b" ")[2]
        assert content
        # The code stays, the port of the address changes.
        store.set(key, value.replace(content, content[:-1] + bytes([content[-1] ^ 1])))
        init_process_group(*args, **kwargs)

    if rank() == 0:
        dist.init_process_group = change_and_init
    return error_of(join)


def test_changed_address_in_the_store_is_refused():
    """This prevents a relay between two ranks."""
    error = error_on_rank_0(join_with_changed_address)
    assert error.startswith("Unauthenticated the store entry 'hpctrain/0/0//cpu//0/1' was written by")


def join_without_proof_of_rank_1() -> str:
    messages._PROOF_LIMIT = timedelta(seconds=0.5)
    if rank() == 1:
        messages.prove = lambda group: time.sleep(2)
    return error_of(join)


def test_rank_without_timely_proof_of_the_secret_is_reported():
    error = error_on_rank_0(join_without_proof_of_rank_1)
    assert error.startswith("RendezvousError rank 0 waited ")
    assert " s for rank 1 to authenticate: " in error
    assert "store at 127.0.0.1:" in error


def send_wrong_length(operation: str) -> str:
    context = join()
    if rank() == 1:
        messages._header = lambda *_, header=messages._header: header(*_) + 1
    return error_of(lambda: context.all_gather("") if operation == "gather" else context.broadcast("", 1))


@pytest.mark.parametrize("operation", ["gather", "broadcast"])
def test_changed_length_is_refused(operation):
    error = error_on_rank_0(send_wrong_length, operation)
    assert error.startswith("Unauthenticated the length of a message from group rank 1 has an invalid")


def send_wrong_code(path: Path) -> str:
    context = join()
    if rank() == 1:
        messages.code = lambda *parts, code=messages.code: code(*parts[:-1], b"something else")
    return error_of(lambda: context.all_gather(pickle.dumps(Evil(path)) if rank() else b""))


def test_message_with_a_wrong_code_is_refused(tmp_path):
    error = error_on_rank_0(send_wrong_code, tmp_path / "evil")
    assert "group rank 1 has an invalid authentication code" in error
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"1",
        b"{}",
        b'{"value": {"tensor": 3}, "tensors": []}',
        b'{"value": {"dtype": "load"}, "tensors": []}',
        b'{"value": {"reduce": []}, "tensors": []}',
        b'{"value": {"a": 1, "b": 2}, "tensors": []}',
        b'{"value": {"dict": [[[1], 2]]}, "tensors": []}',
        json.dumps({"value": {"tuple": None}}).encode(),
    ],
    ids=range(9),
)
def test_malformed_message_is_refused(text):
    """Without a secret, any process can send it."""
    with pytest.raises(Unauthenticated, match="in an invalid form"):
        messages._unpack(text, [], "a message")
