"""Requests of the supervisor to save the state of this rank after the failure of another rank.

The heartbeat thread handles the requests, because the main thread may wait for the failed rank. A lock keeps
the state unchanged meanwhile: the main thread holds it while it changes the state, and never waits for other
ranks while it holds it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hpctrain.tracebacks import is_peer_lost

#: Time limit for the main thread to complete a change of the state.
_FREEZE_LIMIT_S = 5.0
#: Time for the request to arrive after this rank has lost the connection to another rank.
_REQUEST_LIMIT_S = 5.0
#: Time limit for the save, after which this rank exits by itself.
_SAVE_LIMIT_S = 120.0

Message = Mapping[str, Any]


class StateSource(Protocol):
    """The training, as seen by the heartbeat thread. The state does not change during these calls.

    Attributes:
        folder: the folder in the memory of this node.
    """

    folder: Path

    def describe(self) -> dict[str, Any]:
        """Return the step of the state, and other values for the next attempt; or `why` it is not usable."""

    def save(self) -> dict[str, Any]:
        """Save the state in the memory of this node; return the bytes written."""


class EmergencySave:
    """Access to the state of the training in this process.

    Attributes:
        is_available: True if a supervisor can send requests to this process.
        problem: reason why training saves no emergency checkpoints, if known.
        has_lost_peer: True if training failed because another rank was lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_changing = self._is_frozen = False
        self._source: StateSource | None = None
        self._requested, self._released = threading.Event(), threading.Event()
        self.problem: str | None = None
        self.is_available = self.has_lost_peer = False

    def heartbeat(self) -> dict[str, Any]:
        """Return this rank's part of a heartbeat."""
        folder = None if self._source is None else str(self._source.folder)
        return {"folder": folder, "lost_peer": self.has_lost_peer}

    def arm(self, source: StateSource) -> None:
        """Allow saves of the state, which is now complete."""
        self._source = source
        self.end_change()

    def disarm(self) -> None:
        """Reject further requests. Waits for a save in progress."""
        self.begin_change()
        self._source = None
        self.end_change()

    def begin_change(self) -> None:
        """Mark the state as incomplete. Called by the main thread, which waits while the state is saved.

        Raises:
            TimeoutError: the save did not end in time, for example because the supervisor has exited.
        """
        if self._source is not None and not self._is_changing:
            if not self._lock.acquire(timeout=_SAVE_LIMIT_S):
                raise TimeoutError(f"the emergency checkpoint was not complete within {_SAVE_LIMIT_S:g} s")
            self._is_changing = True

    def end_change(self) -> None:
        """Mark the state as complete."""
        if self._is_changing:
            self._is_changing = False
            self._lock.release()

    def hold_exit(self, error: BaseException) -> None:
        """Wait for a save if `error` is a consequence of the failure of another rank."""
        if self._source is None or not is_peer_lost(
            str(error), [its.__name__ for its in type(error).__mro__]
        ):
            return
        self.has_lost_peer = True
        if self._requested.wait(_REQUEST_LIMIT_S):
            self._released.wait(_SAVE_LIMIT_S)

    def handle(self, rank: int, message: Message) -> dict[str, Any] | None:
        """Handle a message of the supervisor; return the answer, if any. Called by the heartbeat thread."""
        if "freeze_state" in message:
            return {"frozen_state": self._freeze()}
        if "save_state" in message:
            return {"saved_state": self._save()} if message["save_state"] == rank else None
        if "release_state" in message:
            self._release()
        return None

    def _freeze(self) -> dict[str, Any]:
        source = self._source
        if source is None:
            return {"why": self.problem}
        self._requested.set()
        if not self._is_frozen:
            if not self._lock.acquire(timeout=_FREEZE_LIMIT_S):
                return {"why": "the state of the rank is incomplete"}
            self._is_frozen = True
        try:
            return {**source.describe(), "folder": str(source.folder)}
        except Exception as error:  # noqa: BLE001 (the supervisor reports the error)
            return {"why": f"{type(error).__name__}: {error}"}

    def _save(self) -> dict[str, Any]:
        source, begun = self._source, time.monotonic()
        assert source is not None
        try:
            return {**source.save(), "seconds": round(time.monotonic() - begun, 6)}
        except Exception as error:  # noqa: BLE001 (the supervisor reports the error)
            return {"why": f"{type(error).__name__}: {error}"}

    def _release(self) -> None:
        if self._is_frozen:
            self._is_frozen = False
            self._lock.release()
        self._requested.set()
        self._released.set()


#: The access of this process.
emergency_save = EmergencySave()
