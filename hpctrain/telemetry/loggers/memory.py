"""What a logger has got so far, kept in the run folder, so that no step comes to it twice."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hpctrain.files import write_atomic


@dataclass
class Memory:
    """It outlives the process: a logger of the next start of the ranks goes on with it."""

    path: Path
    known: str | None = None
    """The tracker's own name for the run."""
    offset: int = 0
    """Up to which byte of `metrics.jsonl` everything was delivered."""
    attempt: int = -1
    """The newest start of the ranks of which something was delivered."""
    steps: dict[str, int] = field(default_factory=dict)
    """The last step that was delivered, of each metric."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """What was kept; nothing where that is damaged or missing."""
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            known, offset, attempt = kept["known"], int(kept["offset"]), int(kept["attempt"])
            # What was on its way when the process ended may have arrived. Then it must not come again.
            steps = {str(name): int(step) for name, step in (kept["sending"] or kept["steps"]).items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return cls(path)
        return cls(path, None if known is None else str(known), offset, attempt, steps)

    def save(self, sending: dict[str, int] | None = None) -> None:
        """Write it down, with what `steps` will be once that is delivered which is about to be sent.

        Raises:
            OSError: it cannot be written.
        """
        kept: dict[str, Any] = {"known": self.known, "offset": self.offset, "attempt": self.attempt}
        kept |= {"steps": self.steps, "sending": sending}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path, json.dumps(kept) + "\n", durable=False)
