"""Emergency checkpoint after the failure of a rank: the supervisor's side of `emergency_save`.

All ranks freeze their state and report its step. A rank with the newest state then saves it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from hpctrain import system
from hpctrain.supervisor.launch.job_step import EmergencySaveEnded, EmitEvent
from hpctrain.text import format_ranks

log = logging.getLogger(__name__)

#: Time limit for the answers of the ranks.
_ANSWER_LIMIT_S = 8.0


class EmergencyRequest:
    """Request for the state of an attempt. All calls are made by one thread, except for `begin`.

    Attributes:
        folder: folder on each node in which the ranks keep records and states; None if unknown.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], object], emit: EmitEvent) -> None:
        """Wait for the failure of a rank.

        Args:
            send: sends a message to all ranks.
            emit: receives the result.
        """
        self._send, self._emit = send, emit
        self.folder: str | None = None
        self._connected: set[int] = set()
        #: Ranks that may have a usable state.
        self._armed: set[int] = set()
        self._begun_at: float | None = None
        self._frozen_at = 0.0
        self._states: dict[int, dict[str, Any]] = {}
        self._saver: int | None = None
        self._ended = False

    def begin(self) -> bool:
        """Request the state of the ranks; return False if no rank is connected."""
        if not self._connected:
            return False
        if self._begun_at is None:
            self._begun_at = system.monotonic()
            self._send({"freeze_state": True})
        return True

    def on_message(self, rank: int, message: Mapping[str, Any]) -> None:
        """Handle a heartbeat or an answer of a rank."""
        if "emergency" in message:
            self._connected.add(rank)
            has_state = message["emergency"].get("folder") is not None
            (self._armed.add if has_state else self._armed.discard)(rank)
        state = message.get("emergency") or message.get("frozen_state") or {}
        self.folder = state.get("folder") or self.folder
        if state.get("lost_peer"):
            self.begin()
        if "frozen_state" in message:
            self._states[rank] = message["frozen_state"]
            self.check()
        elif "saved_state" in message and rank == self._saver and not self._ended:
            self._on_saved(message["saved_state"])

    def on_disconnect(self, rank: int) -> None:
        """Handle the exit of a rank."""
        self._connected.discard(rank)
        self._armed.discard(rank)
        self._states.pop(rank, None)
        if rank == self._saver:
            self._end(f"rank {rank} failed before it had saved the state")
        else:
            self.check()

    def check(self) -> None:
        """Select the rank that saves, once all ranks have answered or the time limit is over."""
        if self._begun_at is None or self._saver is not None or self._ended:
            return
        # Without a usable state, a single answer has the reason.
        if missing := (self._armed if self._states else self._connected) - self._states.keys():
            if system.monotonic() - self._begun_at < _ANSWER_LIMIT_S:
                return
            log.warning(
                "%s did not respond to the request for an emergency checkpoint", format_ranks(sorted(missing))
            )
        usable = {rank: state for rank, state in self._states.items() if "step" in state}
        if not usable:
            reasons = sorted({state["why"] for state in self._states.values() if state.get("why")})
            self._end("; ".join(reasons))
            return
        self._frozen_at = system.monotonic()
        self._saver = min(usable, key=lambda rank: (-usable[rank]["step"], -usable[rank]["read"], rank))
        self._send({"save_state": self._saver})

    def _on_saved(self, saved: Mapping[str, Any]) -> None:
        if "path" not in saved:
            self._end(f"rank {self._saver} could not save its state: {saved.get('why')}")
            return
        assert self._begun_at is not None
        assert self._saver is not None
        self._ended = True
        state = self._states[self._saver]
        record = {
            "step": int(state["step"]),
            "read": int(state["read"]),
            "trained": bool(state["trained"]),
            "buffers_change": bool(state["buffers_change"]),
            "files": str(state["files"]),
            "rank": self._saver,
            "path": str(saved["path"]),
            "bytes": int(saved["bytes"]),
            "freeze_s": round(self._frozen_at - self._begun_at, 6),
            "save_s": round(system.monotonic() - self._frozen_at, 6),
        }
        self._emit(EmergencySaveEnded(record))

    def _end(self, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._send({"release_state": True})
            self._emit(EmergencySaveEnded({}, reason))
