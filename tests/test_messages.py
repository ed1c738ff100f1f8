"""Messages between ranks: accepted and refused ones."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks

from hpctrain import detect
from hpctrain.checkpoint.io import messages
from hpctrain.errors import UserError
from hpctrain.runtime.distributed_context import DistributedContext, init_distributed

pytestmark = pytest.mark.ranks


def rank() -> int:
    return int(os.environ["RANK"])


def join() -> DistributedContext:
    return init_distributed(detect(os.environ), os.environ)


def values() -> dict:
    return {
        "plain": (1, 2.5, float("inf"), None, True, "ü\ud800", -(10**30)),
        7: [{(1, 2): torch.float16}, [], {}, ()],
        "tensors": [torch.arange(3, dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 2)],
        "transposed": torch.arange(6).reshape(2, 3).T,
        "array": np.arange(6, dtype="i4").reshape(2, 3)[:, ::-2],
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


@on_ranks(group=False)
def test_values_arrive_unchanged():
    context = join()
    both = [{"rank": 0, **values()}, {"rank": 1, **values()}]
    assert is_same(context.all_gather(both[rank()]), both)
    assert is_same(context.broadcast(both[rank()], 1), both[1])
    assert context.broadcast_from_main(rank()) == 0
    group = dist.new_group([0, 1], backend="gloo")
    assert messages.gather(group, rank(), to=0) == ([0, 1] if rank() == 0 else [None, None])


@on_ranks(group=False)
def test_unsupported_and_too_large_values_are_refused_on_all_ranks():
    context = join()
    for bad in ({1}, Path("x"), type("Sub", (dict,), {})()):
        expected = rf"the result of predict_step cannot be sent .*\.{type(bad).__name__}\."
        with pytest.raises(UserError, match=expected):
            context.all_gather(bad if rank() == 1 else 1, "the result of predict_step")
    messages.MAX_MESSAGE_BYTES = 300
    with pytest.raises(
        UserError, match="a message is 428 bytes long on one rank, but the limit is 300 bytes"
    ):
        context.all_gather("x" * 400 if rank() == 1 else "")
