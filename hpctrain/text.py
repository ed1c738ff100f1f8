"""Format numbers, sizes, durations, plurals and suggestions for users, and check values."""

from __future__ import annotations

import math
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TypeGuard

#: Placeholder for a missing value.
NOTHING = "–"
#: A narrow no-break space between groups of three digits.
_GROUP = "\u202f"

#: JSON allows integers too large for a float, and Python's JSON also allows infinity and NaN.
_LARGEST = sys.float_info.max

_DURATIONS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGKILL`; Python has no names for most real-time signals."""
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def short_name(host: str) -> str:
    """Return a host's name without its domain, which Slurm's node name may lack."""
    return host.partition(".")[0]


def format_number(value: float | None) -> str:
    """Format with five significant digits, or as `NaN`."""
    if value is None:
        return NOTHING
    return "NaN" if math.isnan(value) else f"{value:.5g}"


def format_count(value: int | None) -> str:
    """Format with digits in groups of three."""
    return NOTHING if value is None else f"{value:,}".replace(",", _GROUP)


def pluralize(value: float | None, noun: str) -> str:
    """Format a number with its noun: `1 step`, `2 steps`, `1.5 CPU-hours`."""
    number = format_count(value) if isinstance(value, int) else format_number(value)
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def join_or(words: Iterable[str]) -> str:
    """Join alternatives: `a`, `a or b`, `a, b or c`."""
    *alternatives, final = words
    return f"{', '.join(alternatives)} or {final}" if alternatives else final


def format_ranks(ranks: Sequence[int], noun: str = "rank") -> str:
    """Format ascending numbers with their noun: `rank 3`, `ranks 0-2, 5`. Lists at most 20 ranges."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][-1] + 1 == rank:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    texts = ["-".join(map(str, bounds)) for bounds in ranges]
    num_hidden = sum(bounds[-1] - bounds[0] + 1 for bounds in ranges[20:])
    hidden = f" and {num_hidden} more" if num_hidden else ""
    return f"{noun}{'s' * (len(ranks) > 1)} {', '.join(texts[:20])}{hidden}"


def format_share(part: float | None) -> str:
    if part is None:
        return NOTHING
    percent = 100 * part
    return "< 0.1%" if 0 < percent < 0.05 else f"{percent:.1f}%"


def format_size(num_bytes: float | None) -> str:
    """Format bytes on disk in powers of ten: `1.2 GB`."""
    return _format_bytes(num_bytes, 1000, ("B", "kB", "MB", "GB", "TB"))


def format_memory(num_bytes: float | None) -> str:
    """Format bytes of memory in powers of two: `1.5 GiB`."""
    return _format_bytes(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def _format_bytes(num_bytes: float | None, base: int, units: tuple[str, ...]) -> str:
    if num_bytes is None:
        return NOTHING
    value, unit = float(num_bytes), units[0]
    for larger in units[1:]:
        if value < base - 0.5:
            break
        value, unit = value / base, larger
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def format_duration(seconds: float | None) -> str:
    """Format with at most two units: `2 d 3 h`, `1 h 12 min`, `3 min 5 s`, `12.3 s`, `45 ms`."""
    if seconds is None:
        return NOTHING
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    for large_s, large, small_s, small in _DURATIONS:
        if round(seconds) >= large_s:
            count, small_count = divmod(round(seconds / small_s), large_s // small_s)
            return f"{count} {large} {small_count} {small}" if small_count else f"{count} {large}"
    raise AssertionError(seconds)


def format_time(seconds: float | None) -> str:
    return NOTHING if seconds is None else _local(seconds).strftime("%Y-%m-%d %H:%M:%S")


def format_clock(seconds: float | None) -> str:
    """Format seconds since the epoch as local time, preceded by day, month and, if not the current, year."""
    if seconds is None:
        return NOTHING
    time = _local(seconds)
    year = "" if time.year == datetime.now().year else " %Y"
    return time.strftime(f"%d %b{year} %H:%M:%S")


def _local(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds).astimezone()


def is_count(text: str) -> bool:
    """True if `text` consists of 1 to 18 ASCII digits; `int` rejects numbers with thousands of digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 18


def is_finite(value: object) -> TypeGuard[float]:
    """True if a JSON value is a finite number that fits a float."""
    kind = type(value)
    return (kind is float or kind is int) and -_LARGEST <= value <= _LARGEST  # type: ignore[operator]


def printable(text: str) -> str:
    """Replace control characters in `text`, which a terminal would interpret."""
    return "".join(
        character if character.isprintable() or character == _GROUP else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


#: Operating system commands such as titles and links, and control sequences; also if truncated.
_ESCAPES = re.compile(r"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-?]*[ -/]*[@-~]")
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
#: All control characters except backspace, tab, line feed and carriage return.
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]|\x1b(?!\[[0-9;:]*m)")


def without_escapes(text: str) -> str:
    """Remove terminal escape sequences, such as those that set the title, but not those of colors."""
    colored = _ESCAPES.sub(lambda match: match[0] if _COLOUR.fullmatch(match[0]) else "", text)
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", colored)


def suggest(word: str, known: Iterable[str], *, otherwise: str | None = None) -> str:
    """Return a sentence with the closest match in `known`."""
    from difflib import get_close_matches

    names = list(known)
    for spelling in dict.fromkeys((word, word.replace("-", "_"), word.replace("_", "-"))):
        matches = [name for name in names if spelling in re.split("[-_]", name)]
        if close := get_close_matches(spelling, names, 1) or matches[:3]:
            return f"Did you mean {join_or(map(repr, close))}?"
    return f"Choose from {', '.join(names)}." if otherwise is None else otherwise
