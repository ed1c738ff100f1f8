"""Parse Slurm's notation of durations, times, pairs, sizes, lists and generic resources."""

from __future__ import annotations

import re
from datetime import datetime

from hpctrain.errors import SpecError

_FORMS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS"
_DURATION = re.compile(r"(?:(?P<days>\d{1,5})-)?(?P<clock>\d{1,9}(?::\d{1,2}){0,2})", re.ASCII)


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration in one of the forms of sbatch's `--time`; None means no limit."""
    if text.upper() in ("UNLIMITED", "INFINITE"):
        return None
    match = _DURATION.fullmatch(text)
    if match is None:
        raise SpecError(f"{text!r} is not a valid duration. Use {_FORMS}, or 'unlimited'.")
    clock = [int(digits) for digits in match["clock"].split(":")]
    # The first field is hours after a day or if there are three fields, and otherwise minutes.
    weights = (3600, 60, 1) if match["days"] or len(clock) == 3 else (60, 1)
    days = int(match["days"] or 0)
    seconds = 86400 * days + sum(digits * weight for digits, weight in zip(clock, weights, strict=False))
    if seconds == 0:
        raise SpecError(f"The duration {text!r} is zero. Use a longer duration or 'unlimited'.")
    return float(seconds)


def format_time_limit(seconds: float | None) -> str:
    """Return `D-HH:MM:SS`, or `HH:MM:SS` below a day, rounded up to whole seconds; None is `unlimited`."""
    if seconds is None:
        return "unlimited"
    minutes, left_over = divmod(-int(-seconds // 1), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours:02d}:{minutes:02d}:{left_over:02d}"
    return f"{days}-{clock}" if days else clock


#: A start within this many seconds counts as immediate.
SOON_S = 30

#: Words for a missing value.
_NOTHING = frozenset({"", "(null)", "n/a", "none", "unlimited", "infinite"})

_PAIR = re.compile(r"(?:^|\s)([A-Za-z_][\w:/]*)=(\S*)")
# Longer numbers are not counts.
_NUMBER = re.compile(r"(?<!\d)\d{1,18}(?!\d)")
_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)([KMGT]?)B?", re.IGNORECASE)
_MIB_OF = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
# gpu:4, gpu:a100:4, gpu:a100:4(S:0-1), gpu:a100_3g.40gb:2(IDX:0-1)
_GPU = re.compile(r"(?:^|,)gpu(?::(?P<type>[^,:()]*))??(?::(?P<number>\d{1,18})[KMG]?)?(?=[(,]|$)")


def parse_pairs(line: str) -> dict[str, str]:
    """Return the `Key=value` pairs of a line of `scontrol --oneliner show`; values contain no spaces."""
    return dict(_PAIR.findall(line))


def is_null(text: str) -> bool:
    """True if the word means no value or no limit."""
    return text.strip().lower() in _NOTHING


def parse_number(text: str) -> int | None:
    """Return the first number of a word such as `30 sec`; None without a number (no limit)."""
    match = _NUMBER.search(text)
    return int(match[0]) if match else None


def parse_time_limit(text: str) -> float | None:
    """Return the seconds of a time limit in `--time` notation; None means no limit."""
    if is_null(text):
        return None
    try:
        return parse_duration(text)
    except SpecError:
        return None


def parse_size_mib(text: str) -> int | None:
    """Return a memory size in MiB (the default unit), rounded up; None if it is not a size."""
    match = _SIZE.fullmatch(text.strip())
    return -int(-float(match[1]) * _MIB_OF[match[2].upper()] // 1) if match else None


def parse_names(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list; empty if it has no value."""
    return () if is_null(text) else tuple(name for name in text.split(",") if name)


def parse_names_or_all(text: str) -> tuple[str, ...] | None:
    """Return the names of a comma-separated list; None means all."""
    return None if is_null(text) or text.upper() == "ALL" else parse_names(text)


def parse_gpus(gres: str) -> dict[str, int]:
    """Return the number of GPUs by type in a list of generic resources. Untyped GPUs have the key ""."""
    counts: dict[str, int] = {}
    for match in _GPU.finditer(gres):
        kind = match["type"] or ""
        counts[kind] = counts.get(kind, 0) + int(match["number"] or 1)
    return counts


def parse_timestamp(text: str) -> float | None:
    """Return the seconds since the epoch of a local time in Slurm's notation; None if it is not a time."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        return None
