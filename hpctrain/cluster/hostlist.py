"""Slurm's compact node lists: `n[01-03,7],gpu-a[1-2]b` and the names that they stand for.

The grammar is the one of `scontrol show hostnames`: names separated by commas; a name may hold any
number of brackets, each a comma-separated list of numbers and ranges; a range keeps the width of its
first number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from itertools import product

from hpctrain.errors import UserError

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_TRAILING_NUMBER = re.compile(r"(.*?)(\d+)", re.DOTALL)
#: A list that expands to more names than any cluster has is a typing error, not a request.
_MOST_NAMES = 1_000_000


def expand_hostlist(hostlist: str) -> list[str]:
    """Names that `hostlist` stands for, in Slurm's order.

    Raises:
        UserError: the list is malformed; the message quotes it and points at the place.
    """
    names: list[str] = []
    for start, item in _split(hostlist):
        parts = list(_parse_item(hostlist, start, item))
        if len(names) + math.prod(len(part) for part in parts) > _MOST_NAMES:
            raise UserError(
                f"node list {hostlist!r} stands for more than {_MOST_NAMES} nodes. Check its ranges."
            )
        names.extend(_combine(parts))
    return names


def compress_hostlist(names: Iterable[str]) -> str:
    """The compact list that expands to exactly `names`, in their order.

    Runs of neighbours that differ only in a trailing number of the same width are folded.
    """
    groups: list[tuple[str, list[tuple[str, str]]]] = []
    for name in names:
        match = _TRAILING_NUMBER.fullmatch(name)
        if match is None:
            groups.append((name, []))
            continue
        prefix, number = match[1], match[2]
        if not groups or groups[-1][0] != prefix or not groups[-1][1]:
            groups.append((prefix, []))
        ranges = groups[-1][1]
        if ranges and len(ranges[-1][1]) == len(number) and int(ranges[-1][1]) + 1 == int(number):
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ",".join(_fold(prefix, ranges) for prefix, ranges in groups)


def _fold(prefix: str, ranges: list[tuple[str, str]]) -> str:
    if not ranges:
        return prefix
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return prefix + ranges[0][0]
    return prefix + "[" + ",".join(a if a == b else f"{a}-{b}" for a, b in ranges) + "]"


def _combine(parts: list[list[str]]) -> Iterator[str]:
    """Every combination, in Slurm's order: the last bracket runs fastest, then the first, then the second."""
    leading = max((i for i, part in enumerate(parts) if len(part) > 1), default=0)
    order = [*reversed(range(leading)), *range(leading, len(parts))]
    back = sorted(range(len(parts)), key=order.__getitem__)
    for choice in product(*(parts[i] for i in order)):
        yield "".join(choice[i] for i in back)


def _split(hostlist: str) -> Iterator[tuple[int, str]]:
    """Yield (offset, item) for the items between the commas that stand outside brackets."""
    start, depth = 0, 0
    for i, char in enumerate(hostlist + ","):
        if char == "[":
            if depth:
                raise _malformed(hostlist, i, "a bracket inside a bracket")
            depth = 1
        elif char == "]":
            if not depth:
                raise _malformed(hostlist, i, "a ']' without its '['")
            depth = 0
        elif char == "," and (not depth or i == len(hostlist)):
            if depth:
                raise _malformed(hostlist, hostlist.rindex("["), "a '[' without its ']'")
            if hostlist[start:i].strip():
                yield start, hostlist[start:i]
            start = i + 1


def _parse_item(hostlist: str, start: int, item: str) -> Iterator[list[str]]:
    """Yield, for each part of one name, the texts that it may take."""
    offset = start + len(item) - len(item.lstrip())
    for part in re.split(r"(\[[^\]]*\])", item.strip()):
        if part.startswith("["):
            yield list(_parse_bracket(hostlist, offset + 1, part[1:-1]))
        elif part:
            space = re.search(r"\s", part)
            if space:
                raise _malformed(hostlist, offset + space.start(), "a space inside a name")
            yield [part]
        offset += len(part)


def _parse_bracket(hostlist: str, offset: int, body: str) -> Iterator[str]:
    for piece in body.split(","):
        match = _RANGE.fullmatch(piece)
        if match is None:
            raise _malformed(hostlist, offset, f"{piece!r} is neither a number nor a range")
        first, last = match[1], match[2] or match[1]
        low, high = int(first), int(last)
        if low > high:
            raise _malformed(hostlist, offset, f"the range {piece} runs backwards")
        if high - low >= _MOST_NAMES:
            raise _malformed(hostlist, offset, f"the range {piece} has more than {_MOST_NAMES} names")
        width = len(first)
        for number in range(low, high + 1):
            yield str(number).zfill(width)
        offset += len(piece) + 1


def _malformed(hostlist: str, position: int, problem: str) -> UserError:
    return UserError(f"node list {hostlist!r} is malformed at character {position + 1}: {problem}.")
