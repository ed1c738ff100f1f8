"""Delivery state of a logger in the run folder, to avoid sending a step twice."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hpctrain.files import make_folder, read_json, write_atomic


@dataclass
class LoggerState:
    """Persistent delivery state, from which the logger of the next attempt resumes."""

    path: Path
    known: str | None = None
    """Name of the run in the tracker."""
    offset: int = 0
    """Offset of the delivered lines in `metrics.jsonl`, in bytes."""
    attempt: int = -1
    """The newest attempt with delivered lines."""
    steps: dict[str, int] = field(default_factory=dict)
    """The last delivered step of each metric."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Load the saved state; return an empty one if the file is damaged or missing."""
        try:
            kept = read_json(path)
            known, offset, attempt = kept["known"], int(kept["offset"]), int(kept["attempt"])
            # Lines in flight at the end of the process may have been delivered, so they must not be sent
            # again.
            steps = {str(name): int(step) for name, step in (kept["sending"] or kept["steps"]).items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return cls(path)
        return cls(path, None if known is None else str(known), offset, attempt, steps)

    def save(self, sending: dict[str, int] | None = None) -> None:
        """Write the state. `sending` is the value of `steps` after the next delivery.

        Raises:
            OSError: the file cannot be written.
        """
        kept: dict[str, Any] = {"known": self.known, "offset": self.offset, "attempt": self.attempt}
        kept |= {"steps": self.steps, "sending": sending}
        make_folder(self.path.parent)
        write_atomic(self.path, json.dumps(kept) + "\n", durable=False)
