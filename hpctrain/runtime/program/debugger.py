"""Debugger of this rank: pdb in the main thread, controlled through a Unix socket.

A signal to this process starts a session. The client (`debug_client.py`) runs on the same host as the same
user, and listens at an abstract address (unix(7)), so no port is opened.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hpctrain.runtime.program.debug_session import DebugSession


def debug_signal() -> signal.Signals | None:
    """Return the signal that starts a session, which no other program uses; None without such signals."""
    return getattr(signal, "SIGRTMIN", None)


def debug_address(pid: int) -> str:
    """Return the address of the client for the process `pid`."""
    return f"hpctrain-debug-{pid}"


class Debugger:
    """Debugger of this process."""

    def __init__(self) -> None:
        self._session: DebugSession | None = None

    def check_attached(self) -> bool:
        """Return true during a session; end a session whose client has exited."""
        session = self._session
        if session is None or session.has_ended:
            return False
        if not (is_connected := session.client.is_connected) and not session.is_stopped:
            session.client.close()  # The client waits for this after the end of its input.
        return is_connected

    def install(self) -> None:
        """Accept requests from now on. Only the main thread may call this."""
        if (number := debug_signal()) is not None:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        session = self._session
        if session is None or not self.check_attached():
            try:
                from hpctrain.runtime.program.debug_session import DebugSession

                session = self._session = DebugSession(debug_address(os.getpid()))
            except OSError as error:
                print(f"hpctrain: cannot connect to the debugger: {error}", file=sys.stderr)
                return
        if not session.is_stopped:
            session.stop_at(frame)


#: The debugger of this process.
debugger = Debugger()
