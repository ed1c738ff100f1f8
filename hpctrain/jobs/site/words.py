"""How Slurm's commands write things down: pairs, times, sizes, lists and generic resources."""

from __future__ import annotations

import re

from hpctrain.errors import SpecError
from hpctrain.jobs.duration import parse_duration

#: What stands for no value.
_NOTHING = frozenset({"", "(null)", "n/a", "none", "unlimited", "infinite"})

_CONFIG_LINE = re.compile(r"^(\S+)\s*= ?(.*)$", re.MULTILINE)
_PAIR = re.compile(r"(?:^|\s)([A-Za-z_][\w:/]*)=(\S*)")
_NUMBER = re.compile(r"\d+")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)B?", re.IGNORECASE)
_MIB_OF = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
# gpu:4, gpu:a100:4, gpu:a100:4(S:0-1), gpu:a100_3g.40gb:2(IDX:0-1)
_GPU = re.compile(r"(?:^|,)gpu(?::(?P<type>[^,:()]*))??(?::(?P<number>\d+)[KMG]?)?(?=[(,]|$)")


def config_values(answer: str) -> dict[str, str]:
    """The lines `Key = value` of `scontrol show config`."""
    return {key: value.strip() for key, value in _CONFIG_LINE.findall(answer)}


def pairs(line: str) -> dict[str, str]:
    """The `Key=value` of a line of `scontrol --oneliner show`; no value has a blank in it."""
    return dict(_PAIR.findall(line))


def is_nothing(word: str) -> bool:
    """Whether a word stands for no value, or for no limit."""
    return word.strip().lower() in _NOTHING


def number(word: str) -> int | None:
    """The first number of a word such as `30 sec`; None where it stands for no limit."""
    match = _NUMBER.search(word)
    return int(match[0]) if match else None


def seconds(word: str) -> float | None:
    """A time limit, written as for `--time`; None for no limit."""
    if is_nothing(word):
        return None
    try:
        return parse_duration(word)
    except SpecError:
        return None


def size_mib(word: str) -> int | None:
    """A size of memory, in MiB where it has no unit, rounded up; None where it is no size."""
    match = _SIZE.fullmatch(word.strip())
    return -int(-float(match[1]) * _MIB_OF[match[2].upper()] // 1) if match else None


def names(word: str) -> tuple[str, ...]:
    """The names of a list; none where it is empty."""
    return () if is_nothing(word) else tuple(name for name in word.split(",") if name)


def names_or_all(word: str) -> tuple[str, ...] | None:
    """The names of a list; None where it stands for all."""
    return None if is_nothing(word) or word.upper() == "ALL" else names(word)


def gpus(gres: str) -> dict[str, int]:
    """GPUs by type out of a list of generic resources; the type is empty where none is given.

    Parentheses say where they sit, or which there are; a `:no_consume` counts none.
    """
    found: dict[str, int] = {}
    for match in _GPU.finditer(gres):
        kind = match["type"] or ""
        found[kind] = found.get(kind, 0) + int(match["number"] or 1)
    return found
