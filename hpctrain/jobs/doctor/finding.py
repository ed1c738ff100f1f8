"""Findings of the diagnosis, and their severity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: A problem prevents jobs from running; a note has information only.
FindingLevel = Literal["ok", "note", "problem"]


@dataclass(frozen=True)
class Finding:
    """A line of the report."""

    topic: str
    name: str
    value: str
    standing: FindingLevel = "ok"
    mend: str = ""
    """The remedy, or the consequence for runs."""
