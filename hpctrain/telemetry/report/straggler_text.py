"""Descriptions of stragglers detected by the supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpctrain.text import format_duration, is_finite

_PARTS = {"data": "waiting for data", "compute": "computing"}


def describe_rank(event: Mapping[str, Any]) -> str:
    """Return a string such as `rank 3 on n7`, as far as the event has this data."""
    rank, host = event.get("rank"), event.get("host")
    return " on ".join(filter(None, [f"rank {rank}" if is_finite(rank) else "", str(host or "")]))


def describe_slowness(event: Mapping[str, Any]) -> str:
    """Return the ratio and the times of a straggler, as the object of "takes"; empty if unknown.

    Example: `1.4 times as long as other ranks (computing: 210 ms per step, other ranks 150 ms)`.
    """
    ratio, part = event.get("ratio"), str(event.get("part"))
    if not is_finite(ratio):
        return ""
    words = f"{ratio:.1f} times as long as other ranks"
    if part not in _PARTS:
        return words
    own, typical = (_seconds(event.get(name), part) for name in ("seconds", "typical"))
    if own is None or typical is None:
        return f"{words} ({_PARTS[part]})"
    times = f"{format_duration(own)} per step, other ranks {format_duration(typical)}"
    return f"{words} ({_PARTS[part]}: {times})"


def _seconds(spent: object, part: str) -> float | None:
    value = spent.get(part) if isinstance(spent, Mapping) else None
    return value if is_finite(value) and value >= 0 else None
