"""Which copy of the code a run runs."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_LIMIT_MB = 200


@dataclass(frozen=True, kw_only=True)
class Code:
    """A copy of the code that a run runs."""

    source: str
    """Root of the working tree that was copied."""
    copy: str
    """Root of the copy, in the run folder."""
    script: str | None
    """Path of the copied script; None where the ranks run one that is not in the working tree."""
