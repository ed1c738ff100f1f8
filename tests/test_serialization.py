"""Serialized calls and results: unpicklable values are reported with their attribute path."""

from __future__ import annotations

import functools
import os
import sys
import threading

import pytest

from hpctrain.errors import UserError
from hpctrain.records.serialization import CallPayload, FunctionCall

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
    ("args", "kwargs", "culprit"),
    [
        ([1, LOCK], {}, "argument 1 has type _thread.lock"),
        ([], {"b": {"x": [0, LOCK]}}, "argument b['x'][1] has type _thread.lock"),
        ([Slotted((LOCK,))], {}, "argument 0.inner[0] has type _thread.lock"),
        ([functools.partial(add, b=LOCK)], {}, "argument 0.keywords['b'] has type _thread.lock"),
    ],
)
def test_unpicklable_argument_is_reported_with_its_path(args, kwargs, culprit):
    with pytest.raises(UserError) as caught:
        CallPayload.serialize(FunctionCall(add, tuple(args), kwargs))
    assert str(caught.value).startswith(f"add(): {culprit}, which cannot be pickled: cannot pickle ")


@pytest.mark.parametrize(
    ("function", "culprit"),
    [
        (local_function(), "inner(): the variable lock in the function has type _thread.lock"),
        (Trainer().fit, "fit(): the object bound to the function.lock has type _thread.lock"),
        (functools.partial(add, LOCK), "add(): the function.args[0] has type _thread.lock"),
    ],
)
def test_unpicklable_part_of_the_function_is_reported(function, culprit):
    with pytest.raises(UserError) as caught:
        CallPayload.serialize(FunctionCall(function))
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
