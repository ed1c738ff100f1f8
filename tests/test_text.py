"""Formats of numbers for people."""

import math

import pytest

from hpctrain.text import format_duration, format_memory, format_number, format_ranks, format_size, pluralize


@pytest.mark.parametrize(
    ("convert", "arguments", "text"),
    [
        (format_number, [0.0051951712], "0.0051952"),
        (format_number, [1234567.0], "1.2346e+06"),
        (format_number, [math.nan], "NaN"),
        (format_number, [None], "–"),
        (pluralize, [1.0, "CPU-hour"], "1 CPU-hour"),
        (pluralize, [1.5, "CPU-hour"], "1.5 CPU-hours"),
        (pluralize, [38400, "GPU"], "38\u202f400 GPUs"),
        (format_size, [999], "999 B"),
        (format_size, [2**30], "1.07 GB"),
        (format_size, [3e15], "3000 TB"),
        (format_memory, [1000 * 2**30], "1000 GiB"),
        (format_memory, [3e15], "2728 TiB"),
        (format_duration, [0.045], "45 ms"),
        (format_duration, [59.94], "59.9 s"),
        (format_duration, [59.96], "1 min"),
        (format_duration, [7260], "2 h 1 min"),
        (format_duration, [1e6], "11 d 14 h"),
        (format_ranks, [[0, 1, 2, 5]], "ranks 0-2, 5"),
    ],
)
def test_values_are_formatted(convert, arguments, text):
    assert convert(*arguments) == text


def test_ranks_after_twenty_ranges_are_counted():
    assert format_ranks([*range(0, 40, 2), 41, 42, 43]).endswith(", 36, 38 and 3 more")
