"""Two ranks that exchange messages: `messages_on_ranks.py CASE [FILE]`. Prints what rank 0 finds."""

from __future__ import annotations

import os
import pickle
import sys
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpctrain import detect, messages
from hpctrain.errors import HpctrainError, Unauthenticated, UserError
from hpctrain.runtime.distributed_context import init_distributed
from hpctrain.runtime.rendezvous.signed_store import SignedStore


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (Path(self.path),)


def values(rank: int) -> dict:
    return {
        "plain": (1, 2.5, float("inf"), None, True, "ü\ud800", -(10**30)),
        7: [{(1, 2): torch.float16}, [], {}, ()],
        "tensors": [torch.arange(3, dtype=torch.bfloat16) + rank, torch.tensor(True), torch.empty(0, 2)],
        "turned": torch.arange(6).reshape(2, 3).T,
        "complex": torch.tensor([1 + 2j]),
        "array": np.arange(6, dtype=">i4").astype("i4").reshape(2, 3)[:, ::-2],
        "number": np.float32(2.5),
        "bytes": [b"abc", b""],
    }


def same(got: object, expected: object) -> bool:
    if isinstance(expected, torch.Tensor | np.ndarray):
        return (
            type(got) is type(expected)
            and got.dtype == expected.dtype
            and got.shape == expected.shape
            and bool((got == expected).all())
        )
    if isinstance(expected, dict):
        return list(got) == list(expected) and all(same(got[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(got) == len(expected) and all(map(same, got, expected)) and type(got) is type(expected)
    return got == expected and type(got) is type(expected)


def everything(team) -> str:
    rank = team.ranks.rank
    assert same(team.gather(values(rank)), [values(0), values(1)])
    assert same(team.broadcast(values(rank), 1), values(1))
    assert team.from_main(rank) == 0
    group = messages.new_group([0, 1], backend="gloo")
    assert messages.gather(group, rank, to=0) == ([0, 1] if rank == 0 else [None, None])
    if rank == 0:
        assert_signed(SignedStore.of(tcp_store(), environ), group.group_name)
    for bad in ({1}, Path("x"), Evil("x"), type("Sub", (dict,), {})()):
        with pytest.raises(
            UserError, match=rf"predict_step returned cannot be sent .*\.{type(bad).__name__}\."
        ):
            team.gather(bad if rank == 1 else 1, "what predict_step returned")
    messages.MAX_MESSAGE_BYTES = 300
    with pytest.raises(UserError) as error:
        team.gather("x" * 400 if rank == 1 else "")
    return str(error.value)


def tcp_store() -> dist.TCPStore:
    return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)


def assert_signed(store: SignedStore, group: str) -> None:
    """Only counters are in the store without a code."""
    values = {key: store._store.get(key) for key in store._store.list_keys()}
    signed = [key for key, value in values.items() if key.startswith("hpctrain/") and not value.isdigit()]
    assert all(store.get(key) for key in signed)
    for name in ("0", group):
        assert any(f"/{name}//cpu//" in key for key in signed), (name, values)


def after_rewriting(init_process_group):
    """Replace the address of rank 1's gloo before this rank reads it."""

    def init(*args, **kwargs):
        store, key = tcp_store(), "hpctrain/0/0//cpu//0/1"
        value = store.get(key)
        content = value.partition(b" ")[2]
        assert content
        # The code stays, the port of the address changes.
        store.set(key, value.replace(content, content[:-1] + bytes([content[-1] ^ 1])))
        init_process_group(*args, **kwargs)

    return init


case, *words = sys.argv[1:]
ranks = detect(os.environ)
environ = {**os.environ, "HPCTRAIN_SECRET": f"of {ranks.rank}" if case == "foreign" else "shared"}
try:
    if case == "intruder" and ranks.rank == 1:
        # It knows the secret of the store, but not that of the group.
        store = SignedStore.of(tcp_store(), environ)
        real = dist.PrefixStore("hpctrain/0/devices", store)
        from hpctrain.runtime.device_assignment import assign_device

        assign_device(ranks, environ, real)
        dist.init_process_group("gloo", store=dist.PrefixStore("hpctrain/0", store), rank=1, world_size=2)
        messages.prove_world(b"a guess")
    if case == "rewritten" and ranks.is_main:
        dist.init_process_group = after_rewriting(dist.init_process_group)
    if case == "silent":
        messages._PROOF_LIMIT = timedelta(seconds=0.5)
        if ranks.rank == 1:
            messages.prove = lambda group: time.sleep(2)
    team = init_distributed(ranks, environ)
    if case == "everything":
        print(everything(team))
    if case == "forged":
        if ranks.rank == 1:
            messages.code = lambda *parts, code=messages.code: code(*parts[:-1], b"something else")
        team.gather(pickle.dumps(Evil(words[0])) if ranks.rank else b"")
    if case == "length":
        if ranks.rank == 1:
            messages._header = lambda *_, header=messages._header: header(*_) + 1
        team.gather("") if words == ["gather"] else team.broadcast("", 1)
    if case == "cost":
        dist.barrier()
        begun = time.perf_counter()
        messages._sessions.clear()
        messages.prove_world(b"shared")
        print(f"{(time.perf_counter() - begun) * 1e3:.1f} ms")
except (Unauthenticated, HpctrainError) as error:
    print(type(error).__name__, error)
except RuntimeError as error:
    print("RuntimeError", str(error).splitlines()[0])
