"""What one look found, and how it stands with that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: A problem will stop jobs; a note is worth knowing before one is surprised.
Standing = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    topic: str
    name: str
    value: str
    standing: Standing = "ok"
    mend: str = ""
    """What to do about it, or what it means for runs."""
