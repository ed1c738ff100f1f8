"""Counting visible GPUs."""

from __future__ import annotations

import pytest

from hpctrain.telemetry.sampling.nvml import count_visible

INSTALLED = ["GPU-aa11", "GPU-bb22", "GPU-cc33"]


@pytest.mark.parametrize(
    ("listed", "number"),
    [
        (None, 3),
        ([], 0),
        (["2", "0"], 2),
        (["0", "5", "1"], 1),
        (["GPU-bb", "GPU-aa11"], 2),
        (["GPU-zz", "GPU-aa11"], 0),
        (["MIG-1", "MIG-2"], 2),
    ],
)
def test_listed_gpus_count_up_to_the_first_invalid_one(listed, number):
    assert count_visible(INSTALLED, listed) == number


@pytest.mark.parametrize("listed", [None, ["0"], ["GPU-aa11"], ["MIG-1"]])
def test_no_gpus_count_without_a_driver(listed):
    assert count_visible([], listed) == 0
