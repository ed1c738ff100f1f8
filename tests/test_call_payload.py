"""Serialized calls and results: unpicklable values are reported with their attribute path."""

import functools
import os
import pickle
import sys
import threading

import pytest

from hpctrain.errors import UserError
from hpctrain.records.call_payload import CallPayload, FunctionCall

LOCK = threading.Lock()


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner


class Trainer:
    def __init__(self):
        self.lock = threading.Lock()

    def fit(self):
        pass


def add(a, b=0):
    return a + b


def local_function():
    lock = LOCK

    def inner():
        return lock

    return inner


@pytest.mark.parametrize(
    ("call", "culprit"),
    [
        (FunctionCall(add, (1, LOCK)), "add(): argument 1 has type _thread.lock, which cannot be pickled: "),
        (FunctionCall(add, (), {"b": {"x": [0, LOCK]}}), "add(): argument b['x'][1] has type _thread.lock"),
        (FunctionCall(add, (Slotted((LOCK,)),)), "add(): argument 0.inner[0] has type _thread.lock"),
        (FunctionCall(add, (functools.partial(add, b=LOCK),)), "add(): argument 0.keywords['b'] has type"),
        (FunctionCall(local_function()), "inner(): the variable lock in the function has type _thread.lock"),
        (FunctionCall(Trainer().fit), "fit(): the object bound to the function.lock has type _thread.lock"),
        (FunctionCall(functools.partial(add, LOCK)), "add(): the function.args[0] has type _thread.lock"),
    ],
)
def test_values_that_cannot_be_pickled_are_reported_with_their_path(call, culprit):
    with pytest.raises(UserError) as caught:
        CallPayload.serialize(call)
    assert str(caught.value).startswith(culprit)


def test_payload_is_read_without_deserializing_it(tmp_path):
    path = tmp_path / "p.pkl"
    path.write_bytes(
        CallPayload.serialize(FunctionCall(add, (1,), {"b": 2}), retry_on_exception=True).to_bytes()
    )
    payload = CallPayload.read(path)
    assert payload.retry_on_exception
    assert payload.sys_path == tuple(map(os.path.realpath, sys.path))
    assert payload.deserialize()() == 3


def test_call_of_an_earlier_version_is_read():
    data = pickle.dumps(FunctionCall(max, (1, 2)), protocol=0)
    assert b"hpctrain.records.call_payload" in data
    call = CallPayload(data.replace(b"records.call_payload", b"records.serialization"), ()).deserialize()
    assert call() == 2
