"""Serialized calls and results: unpicklable values are reported with their attribute path."""

import functools
import os
import sys
import threading

import pytest

from hpctrain.errors import UserError
from hpctrain.records.call_payload import CallPayload, FunctionCall

LOCK = threading.Lock()

#: math.sqrt(4), as a version pickled it in which the class was a dataclass in another module.
EARLIER_CALL = (
    b"\x80\x05\x95l\x00\x00\x00\x00\x00\x00\x00\x8c\x1ehpctrain.records.serialization\x94\x8c\x0cFunctionCall"
    b"\x94\x93\x94)\x81\x94}\x94(\x8c\x08function\x94\x8c\x04math\x94\x8c\x04sqrt\x94\x93\x94\x8c\x04args\x94K\x04"
    b"\x85\x94\x8c\x06kwargs\x94}\x94ub."
)


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
    assert CallPayload(EARLIER_CALL, ()).deserialize()() == 2
