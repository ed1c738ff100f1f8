"""Calls and results on their way: what cannot be pickled is named, down to the attribute."""

from __future__ import annotations

import functools
import os
import sys
import threading
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from helpers.commands import run_command

from hpctrain.errors import UserError
from hpctrain.serialization import CallPayload, FunctionCall, dumps

LOCK = threading.Lock()


@dataclass
class Config:
    name: str
    lock: object = None


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
        ([1, LOCK], {}, "argument 1 is a _thread.lock"),
        ([], {"b": {"x": [0, LOCK]}}, "argument b['x'][1] is a _thread.lock"),
        ([Config("c", LOCK)], {}, "argument 0.lock is a _thread.lock"),
        ([SimpleNamespace(deep=Config("c", {"k": LOCK}))], {}, "argument 0.deep.lock['k'] is a _thread.lock"),
        ([Slotted((LOCK,))], {}, "argument 0.inner[0] is a _thread.lock"),
        ([], {"b": (i for i in ())}, "argument b is a generator"),
        ([functools.partial(add, b=LOCK)], {}, "the arguments of argument 0['b'] is a _thread.lock"),
    ],
)
def test_the_argument_that_cannot_be_pickled_is_named(args, kwargs, culprit):
    with pytest.raises(UserError) as caught:
        CallPayload.serialize(FunctionCall(add, tuple(args), kwargs))
    assert str(caught.value).startswith(f"add(): {culprit}, which cannot be pickled: cannot pickle ")


@pytest.mark.parametrize(
    ("function", "culprit"),
    [
        (local_function(), "inner(): the variable lock in the function is a _thread.lock"),
        (Trainer().fit, "fit(): the object of the function.lock is a _thread.lock"),
        (functools.partial(add, LOCK), "add(): the arguments of the function[0] is a _thread.lock"),
    ],
)
def test_what_the_function_brings_along_is_named(function, culprit):
    with pytest.raises(UserError) as caught:
        CallPayload.serialize(FunctionCall(function))
    assert str(caught.value).startswith(culprit)


def test_a_structure_that_contains_itself_is_searched_once():
    loop = [LOCK]
    loop.insert(0, loop)
    with pytest.raises(UserError, match="_thread"):
        dumps(loop, "f", [("result", loop)])


def test_an_object_that_refuses_in_its_own_words_is_named_itself():
    class Stubborn:
        def __reduce__(self):
            raise RuntimeError("not me")

    with pytest.raises(UserError, match=r"result\[0\] is a .*Stubborn, which cannot be pickled: not me"):
        dumps([Stubborn()], "f", [("result", [Stubborn()])])


def test_a_parcel_is_read_without_opening_it(tmp_path):
    path = tmp_path / "p.pkl"
    path.write_bytes(
        CallPayload.serialize(FunctionCall(add, (1,), {"b": 2}), retry_on_exception=True).to_bytes()
    )
    parcel = CallPayload.read(path)
    assert parcel.retry_on_exception
    assert parcel.sys_path == tuple(map(os.path.realpath, sys.path))
    assert parcel.deserialize()() == 3


def test_a_parcel_can_be_read_where_the_functions_module_is_not_found(tmp_path):
    module = tmp_path / "mine.py"
    module.write_text("def f():\n    return 5\n")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import mine, pathlib; from "
        "hpctrain.serialization import *; "
        "CallPayload.serialize(FunctionCall(mine.f)).write(pathlib.Path('p.pkl'))"
    )
    run_command([sys.executable, "-c", code, tmp_path], cwd=tmp_path)
    parcel = CallPayload.read(tmp_path / "p.pkl")
    assert str(tmp_path) in parcel.sys_path
    with pytest.raises(ModuleNotFoundError, match="mine"):
        parcel.deserialize()


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (add, "add"),
        (functools.partial(functools.partial(add, 1), 2), "add"),
        (lambda: 0, "<lambda>"),
        (Config, "Config"),
    ],
)
def test_what_a_function_is_called(function, name):
    assert FunctionCall(function).name == name
