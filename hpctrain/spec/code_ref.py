"""Reference to the copy of the code that a run executes."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_SNAPSHOT_LIMIT_MB = 200


@dataclass(frozen=True, kw_only=True)
class CodeRef:
    """A copy of the code that a run executes."""

    source: str
    """Root of the working tree that was copied."""
    copy: str
    """Root of the copy, in the run folder."""
    script: str | None
    """Path of the copied script; None if the script is outside the working tree."""
    limit_mb: int = DEFAULT_SNAPSHOT_LIMIT_MB
    """Maximum size of the copy."""
