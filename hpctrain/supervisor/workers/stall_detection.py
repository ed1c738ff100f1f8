"""Detection of attempts that no longer log steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class StallDetector:
    """Detects that an attempt has stopped logging steps; reports each stall once."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._attempt: object = None
        self._ended = self._reported = False

    def on_event(self, event: Mapping[str, Any], now: float) -> None:
        """Handle an event of the run's record."""
        match event.get("kind"):
            case "started":
                self._since, self._attempt, self._ended = None, event.get("attempt"), False
            case "failure" | "signal" | "finished" | "requeue":
                self._since, self._ended = None, True
            case "checkpoint" if self._since is not None:
                self._since = now

    def find_stall(self, now: float, logged_by: object) -> float | None:
        """Return the seconds since the last step if this is an unreported stall.

        Args:
            now: time on a monotonic clock, in seconds.
            logged_by: the attempt that has logged steps since the last call; None without steps.
        """
        is_ours = self._attempt is None or logged_by == self._attempt
        if logged_by is not None and is_ours and not self._ended:
            self._since, self._reported = now, False
        if self._since is None or self._reported or now - self._since < self._limit_s:
            return None
        self._reported = True
        return now - self._since
