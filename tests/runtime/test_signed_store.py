"""Signed values in a store: accepted and refused ones."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import DistStoreError, HashStore, PrefixStore

from hpctrain.authentication import new_secret
from hpctrain.errors import Unauthenticated
from hpctrain.runtime.rendezvous.signed_store import SignedStore

SECRET = new_secret()


@pytest.fixture
def raw():
    return HashStore()


@pytest.fixture
def store(raw):
    return PrefixStore("group", SignedStore.wrap(raw, SECRET))


def test_values_round_trip(store):
    store.set("a", b"\x00 \xff")
    assert store.get("a") == b"\x00 \xff"
    assert store.compare_set("a", b"\x00 \xff", "b") == b"b"
    assert store.compare_set("a", "other", "c") == b"b"
    assert store.compare_set("new", "", "1") == b"1"
    store.multi_set(["x", "y"], ["1", ""])
    assert store.multi_get(["x", "y"]) == [b"1", b""]
    store.wait(["x"], timedelta(seconds=1))
    assert store.check(["x"])
    assert store.delete_key("x")
    assert not store.check(["x"])
    assert store.add("counter", 2) == 2
    assert store.add("counter", 1) == 3
    assert store.clone().get("a") == b"b"
    with pytest.raises(DistStoreError):
        store.wait(["none"], timedelta(seconds=0.1))


def test_changed_value_is_refused(store, raw):
    store.set("a", "1")
    raw.set("group/a", raw.get("group/a")[:-1] + b"2")
    for read in (store.get, lambda key: store.multi_get([key]), lambda key: store.compare_set(key, "", "1")):
        with pytest.raises(Unauthenticated, match="the store entry 'group/a' was written by a process"):
            read("a")


@pytest.mark.parametrize("value", [b"", b"1", b"0" * 64 + b" 1", b"\xff" * 100], ids=range(4))
def test_unsigned_value_is_refused(store, raw, value):
    raw.set("group/a", value)
    with pytest.raises(Unauthenticated):
        store.get("a")


def test_value_of_another_key_or_group_is_refused(store, raw):
    store.set("0", "address")
    for other in ("group/1", "other/0"):
        raw.set(other, raw.get("group/0"))
    with pytest.raises(Unauthenticated):
        store.get("1")
    with pytest.raises(Unauthenticated):
        PrefixStore("other", SignedStore.wrap(raw, SECRET)).get("0")


@pytest.mark.parametrize(
    "other", [new_secret(), {}, {**SECRET, "TORCHELASTIC_RESTART_COUNT": "1"}], ids=range(3)
)
def test_value_of_another_attempt_is_refused(raw, other):
    """Without a supervisor, the secret may be the same."""
    SignedStore.wrap(raw, other).set("a", "1")
    with pytest.raises(Unauthenticated):
        SignedStore.wrap(raw, SECRET).get("a")
