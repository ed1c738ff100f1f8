"""Formats of numbers for people."""

from __future__ import annotations

import math

import pytest

from hpctrain.text import (
    format_duration,
    format_memory,
    format_number,
    format_ranks,
    format_size,
    pluralize,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0051951712, "0.0051952"),
        (1234567.0, "1.2346e+06"),
        (3.0, "3"),
        (math.nan, "NaN"),
        (None, "–"),
    ],
)
def test_numbers_have_five_significant_digits(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "noun", "text"),
    [
        (1, "rank", "1 rank"),
        (1.0, "CPU-hour", "1 CPU-hour"),
        (1.5, "CPU-hour", "1.5 CPU-hours"),
        (38400, "GPU", "38\u202f400 GPUs"),
    ],
)
def test_one_is_singular(value, noun, text):
    assert pluralize(value, noun) == text


def test_ranks_after_twenty_ranges_are_counted():
    assert format_ranks([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert format_ranks([*range(0, 40, 2), 41, 42, 43]).endswith(", 36, 38 and 3 more")


@pytest.mark.parametrize(
    ("num_bytes", "size", "memory"),
    [
        (999, "999 B", "999 B"),
        (1000, "1 kB", "1000 B"),
        (2**30, "1.07 GB", "1 GiB"),
        (1000 * 2**30, "1.07 TB", "1000 GiB"),
        (3e15, "3000 TB", "2728 TiB"),
        (None, "–", "–"),
    ],
)
def test_disk_sizes_use_powers_of_ten_and_memory_powers_of_two(num_bytes, size, memory):
    assert (format_size(num_bytes), format_memory(num_bytes)) == (size, memory)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.045, "45 ms"),
        (59.94, "59.9 s"),
        (59.96, "1 min"),
        (7260, "2 h 1 min"),
        (1e6, "11 d 14 h"),
    ],
)
def test_durations_have_at_most_two_units(seconds, text):
    assert format_duration(seconds) == text
