"""Delivery state of a logger, kept in the run folder so that no step is sent twice."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hpctrain.files import make_folder, read_json, write_atomic


@dataclass
class LoggerState:
    """Delivery state that outlives the process: the logger of the next attempt resumes from it."""

    path: Path
    known: str | None = None
    """The tracker's own name for the run."""
    offset: int = 0
    """Offset in `metrics.jsonl`, in bytes, up to which everything was delivered."""
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
            # Lines in flight when the process ended may have arrived, so they must not be sent again.
            steps = {str(name): int(step) for name, step in (kept["sending"] or kept["steps"]).items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls(path)
        return cls(path, None if known is None else str(known), offset, attempt, steps)

    def save(self, sending: dict[str, int] | None = None) -> None:
        """Write the state. `sending` is the value of `steps` after the delivery that follows.

        Raises:
            OSError: the file cannot be written.
        """
        kept: dict[str, Any] = {"known": self.known, "offset": self.offset, "attempt": self.attempt}
        kept |= {"steps": self.steps, "sending": sending}
        make_folder(self.path.parent)
        write_atomic(self.path, json.dumps(kept) + "\n", durable=False)
