"""Problems that prevent a job, and formatting for their messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SiteProblem:
    """A reason why a job would be rejected or pend forever, with the remedy."""

    message: str
    lifted_by: str | None = None
    """QOS flag that lifts the limit (sacctmgr(1), FLAGS of a QOS)."""


def format_memory(mib: int) -> str:
    """Format an amount of memory exactly, in GiB if possible."""
    return f"{mib // 1024}G" if mib % 1024 == 0 else f"{mib}M"
