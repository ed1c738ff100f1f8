"""Expand and compress Slurm's node lists such as `n[01-03,7],gpu-a[1-2]b`.

Names are separated by any number of commas, spaces or tabs. A name consists of letters, digits, `.`, `_`,
`-` and any number of brackets. A bracket contains numbers and ranges, separated by commas; a range keeps the
width of its first number: `[08-11]` is 08, 09, 10, 11. Names are neither sorted nor deduplicated.

The result is the same as for `scontrol show hostnames`, with these intentional differences from Slurm 22.05:
text after the last bracket (`gpu-a[1-2]b`), long ranges and numbers of more than 64 bits are accepted, up to
a million names in total; unmatched brackets, ranges without an end, and other characters are errors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from string import ascii_letters

from hpctrain.errors import UserError

#: Matches the well-formed beginning of a list, without checking that ranges ascend.
_WELL_FORMED = re.compile(r"(?:[A-Za-z0-9_., \t-]+|\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\])*")
_NUMBER_OR_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_NAME = re.compile(r"[A-Za-z0-9_.-]+")
#: All characters of a name except digits.
_NOT_DIGITS = f"{ascii_letters}_.-"
#: The last three digits of any number, and numbers below 100 by padded width.
_LAST_DIGITS = [f"{number:03}" for number in range(1000)]
_UP_TO_99 = [[str(number).zfill(width) for number in range(100)] for width in range(3)]
#: Maximum number of names: a larger list is a typing error.
MAX_NAMES = 1_000_000
#: Maximum size of a range in Slurm (MAX_RANGE in its hostlist.c).
_MAX_IN_RANGE = 65_536
#: Maximum number of digits that fits into 64 bits, the limit in Slurm.
_MAX_DIGITS = 18
#: Number of characters of a long list to quote before and after the position of a problem.
_QUOTE_CONTEXT = 40


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the names in `hostlist`, in Slurm's order.

    Raises:
        UserError: the list is not a string, is malformed, or has more than a million names; the message
            quotes the list and marks the position.
    """
    if not isinstance(hostlist, str):
        raise UserError(
            f"A node list must be a string, such as 'n[01-03,7]', not {hostlist!r} (type "
            f"{type(hostlist).__name__}). If the list is from an environment variable, check that the "
            "variable is set."
        )
    match = _WELL_FORMED.match(hostlist)
    well_formed = match.end() if match else 0
    if well_formed < len(hostlist):
        raise _syntax_error(hostlist, well_formed)
    try:
        return _expand(hostlist)
    except ValueError:
        raise _range_error(hostlist) from None


def compress_hostlist(names: Iterable[str]) -> str:
    """Return a compact list that expands to exactly `names`, in order, in hpctrain and in Slurm.

    Neighbours that differ only in a trailing number are folded into one bracket: `n[1-3,7]`. If the results
    differ only in one number before the bracket, they are folded again: `rack[1-2]node[1-16]`.

    Raises:
        UserError: one of `names` is not a valid node name.
    """
    names = list(names)
    for name in names:
        if not _NAME.fullmatch(name):
            raise UserError(
                f"{name!r} is not a valid name in a node list. Use only letters, digits, '.', '_' and '-'."
            )
    folded = _fold(_split_trailing_number(name) for name in names)
    return ",".join(_fold(_split_before_bracket(item) for item in folded))


def _expand(hostlist: str) -> list[str]:
    """Expand a well-formed list. Raises ValueError for a descending range or too many names."""
    hostlist = ",".join(hostlist.replace(",", " ").split())
    if not hostlist:
        return []
    # Joining all names and splitting them once is faster than splitting each item.
    texts: list[str] = []
    item: list[str] = []
    num_names = 0
    for index, text in enumerate(_BRACKET.split(f"{hostlist},")):
        if index % 2:
            item.append(text)
            continue
        # Text outside of brackets ends a name, may contain complete names, and begins another name.
        end, comma, following = text.partition(",")
        item.append(end)
        if comma:
            plain, _, begin = following.rpartition(",")
            joined, count = _join_item(item)
            num_names += count
            _check_number(num_names)
            texts += (joined, plain) if plain else (joined,)
            item = [begin]
    names = ",".join(texts).split(",")
    _check_number(len(names))
    return names


def _join_item(item: list[str]) -> tuple[str, int]:
    """Return the names of an item, separated by commas, and their number.

    An item alternates between text and the content of a bracket. Of several brackets, the last varies
    fastest, then the first, then the second, as in Slurm.
    """
    if len(item) == 1:
        return item[0], 1
    if len(item) == 3:
        before, bracket, after = item
        return _join_bracket(bracket, before, after)
    *front, bracket, tail = item
    leads = front[:1]
    for column, text in zip(front[1::2], front[2::2], strict=True):
        numbers, count = _join_bracket(column)
        _check_number(len(leads) * count)
        leads = [lead + number + text for number in numbers.split(",") for lead in leads]
    numbers, count = _join_bracket(bracket)
    _check_number(len(leads) * count)
    endings = numbers.split(",")
    return ",".join([lead + f"{tail},{lead}".join(endings) + tail for lead in leads]), len(leads) * count


def _join_bracket(bracket: str, before: str = "", after: str = "") -> tuple[str, int]:
    """Return the numbers in a bracket, each between two texts, separated by commas; and their count."""
    between = f"{after},{before}"
    if "-" not in bracket:
        return f"{before}{bracket.replace(',', between)}{after}", bracket.count(",") + 1
    pieces, count = [], 0
    for piece in bracket.split(","):
        low, dash, high = piece.partition("-")
        count += int(high) - int(low) + 1 if dash else 1
        _check_number(count)
        if dash and int(low) > int(high):
            raise ValueError
        pieces.append(_join_range(int(low), int(high), len(low), between) if dash else piece)
    return f"{before}{between.join(pieces)}{after}", count


def _join_range(low: int, high: int, width: int, between: str) -> str:
    """Return the numbers from `low` to `high` in at least `width` digits, separated by a text.

    Works in blocks of a thousand, which is three times as fast as single numbers.
    """
    blocks = []
    if low < 100 and width < 3:
        blocks = _UP_TO_99[width][low : high + 1]
        low = 100
    while low <= high:
        thousands, begin = divmod(low, 1000)
        head = str(thousands or "").zfill(width - 3)
        blocks.append(head + f"{between}{head}".join(_LAST_DIGITS[begin : begin + high - low + 1]))
        low += 1000 - begin
    return between.join(blocks)


def _check_number(num_names: int) -> None:
    if num_names > MAX_NAMES:
        raise ValueError


def _fold(splits: Iterable[tuple[str, str, str]]) -> Iterator[str]:
    """Yield items of a node list for names, each given as text, number (or empty) and text."""
    for (before, after, numbered), run in groupby(splits, lambda split: (split[0], split[2], split[1] != "")):
        numbers = [number for _, number, _ in run]
        if numbered:
            ranges = ",".join(_ranges(numbers))
            # After other digits, a plain number would merge with them and become too long for Slurm.
            plain = ranges.isdecimal() and not before[-1:].isdecimal()
            yield before + (ranges if plain else f"[{ranges}]") + after
        else:
            yield from [before + after] * len(numbers)


def _ranges(numbers: list[str]) -> Iterator[str]:
    begin = end = numbers[0]
    low = high = int(begin)
    for number in numbers[1:]:
        if number == str(high + 1).zfill(len(begin)) and high - low + 1 < _MAX_IN_RANGE:
            end = number
            high += 1
        else:
            yield begin if low == high else f"{begin}-{end}"
            begin = end = number
            low = high = int(number)
    yield begin if low == high else f"{begin}-{end}"


def _split_trailing_number(name: str) -> tuple[str, str, str]:
    end = max(len(name.rstrip("0123456789")), len(name) - _MAX_DIGITS)
    return name[:end], name[end:], ""


def _split_before_bracket(item: str) -> tuple[str, str, str]:
    """Split a folded item such as `rack1node[1-16]` at the number before the bracket."""
    head, bracket, _ = item.partition("[")
    end = len(head.rstrip(_NOT_DIGITS)) if bracket else 0
    before, number, _ = _split_trailing_number(head[:end])
    return (before, number, item[end:]) if number else (item, "", "")


def _syntax_error(hostlist: str, place: int) -> UserError:
    if hostlist[place] == "]":
        return _malformed(hostlist, place, "a ']' without a matching '['")
    if hostlist[place] != "[":
        return _malformed(hostlist, place, f"{hostlist[place]!r} is not allowed in a node name")
    inside, closing, _ = hostlist[place + 1 :].partition("]")
    if "[" in inside:
        return _malformed(hostlist, place + 1 + inside.index("["), "a '[' inside brackets")
    if not closing:
        return _malformed(hostlist, place, "a '[' without a matching ']'")
    place += 1
    for piece in inside.split(","):
        if not _NUMBER_OR_RANGE.fullmatch(piece):
            break
        place += len(piece) + 1
    return _malformed(hostlist, place, f"{_quote(piece)[0]} is neither a number nor a range")


def _range_error(hostlist: str) -> UserError:
    for bracket in _BRACKET.finditer(hostlist):
        for piece in _NUMBER_OR_RANGE.finditer(hostlist, *bracket.span(1)):
            # Compared as strings, because Python limits the conversion of numbers to 4300 digits.
            low, high = ((len(text), text) for text in (n.lstrip("0") for n in piece.groups(piece[1])))
            if low > high:
                return _malformed(hostlist, piece.start(), f"{_quote(piece[0])[0]} is in descending order")
    quoted, _ = _quote(hostlist)
    return UserError(f"The node list {quoted} expands to more than {MAX_NAMES:,} names. Check its ranges.")


def _malformed(hostlist: str, place: int, problem: str) -> UserError:
    quoted, column = _quote(hostlist, place)
    return UserError(
        f"The node list is malformed at character {place + 1}: {problem}. Example of a valid list: "
        f"n[01-03,7],gpu1.\n"
        f"    {quoted}\n    {' ' * column}^"
    )


def _quote(text: str, place: int = 0) -> tuple[str, int]:
    """Return the quoted text, truncated around `place` if long, and the column of `place`."""
    before, after = text[:place], text[place:]
    if len(text) > 2 * _QUOTE_CONTEXT:
        if len(before) > _QUOTE_CONTEXT:
            before = "…" + before[-_QUOTE_CONTEXT:]
        if len(after) > _QUOTE_CONTEXT:
            after = after[:_QUOTE_CONTEXT] + "…"
    return repr(before + after), len(repr(before)) - 1
