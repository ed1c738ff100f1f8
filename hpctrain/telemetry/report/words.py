"""Figures for people."""

from __future__ import annotations

from datetime import datetime

NOTHING = "–"
#: Between groups of three digits: a space at which no line ends.
_GROUP = "\u202f"

_UNITS = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def duration(seconds: float | None) -> str:
    """Two units at the most: `2 d 3 h`, `1 h 12 min`, `3 min 5 s`, `12.3 s`, `45 ms`."""
    if seconds is None:
        return NOTHING
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    for large_s, large, small_s, small in _UNITS:
        if round(seconds) >= large_s:
            count, rest = divmod(round(seconds / small_s), large_s // small_s)
            return f"{count} {large} {rest} {small}" if rest else f"{count} {large}"
    raise AssertionError(seconds)


def size(num_bytes: float | None) -> str:
    """`1.2 GB`, by powers of ten as disks are sold."""
    if num_bytes is None:
        return NOTHING
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5 or unit == "TB":
            break
        num_bytes /= 1000
    return f"{num_bytes:.3g} {unit}" if unit == "B" or num_bytes < 999.5 else f"{num_bytes:.0f} {unit}"


def share(part: float | None) -> str:
    """A part of one, in per cent."""
    if part is None:
        return NOTHING
    percent = 100 * part
    return "< 0.1 %" if 0 < percent < 0.05 else f"{percent:.1f} %"


def number(value: float | None) -> str:
    """Five significant digits."""
    return NOTHING if value is None else f"{value:.5g}"


def whole(value: int | None) -> str:
    """Digits in groups of three."""
    return NOTHING if value is None else f"{value:,}".replace(",", _GROUP)


def plain(text: str) -> str:
    """A text without anything that a terminal would obey, which the names in it may hold."""
    return "".join(one if one.isprintable() or one == _GROUP else "\N{REPLACEMENT CHARACTER}" for one in text)


def count(value: int | None, what: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{whole(value)} {what}{'' if value == 1 else 's'}"


def moment(seconds: float | None) -> str:
    """Local date and time."""
    if seconds is None:
        return NOTHING
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def clock(seconds: float | None) -> str:
    """Local time, with the day of the month before it."""
    if seconds is None:
        return NOTHING
    return datetime.fromtimestamp(seconds).astimezone().strftime("%d %b %H:%M:%S")
