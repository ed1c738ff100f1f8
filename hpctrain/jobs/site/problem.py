"""What stands in the way of a job, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass

from hpctrain.jobs.duration import format_duration


@dataclass(frozen=True)
class Problem:
    """Why a job would be refused, or would wait for ever, with what to do about it."""

    words: str
    lifted_by: str | None = None
    """The flag of a QOS that lifts the limit (sacctmgr(1), FLAGS of a QOS)."""


def duration(seconds: float | None) -> str:
    """A time limit in Slurm's notation."""
    return "unlimited" if seconds is None else format_duration(seconds)


def memory(mib: int) -> str:
    """An amount of memory, as short as is exact."""
    return f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M"


def plural(number: int, noun: str) -> str:
    """A number of things."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
