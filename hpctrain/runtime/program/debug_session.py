"""Session of the debugger of this rank: pdb, with a Unix socket as its terminal."""

from __future__ import annotations

import os
import pdb
import select
import socket
import sys
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

from hpctrain.runtime.program.child_relay import connect_to_own_process
from hpctrain.runtime.stopping.signal_recorder import pending_stop_signal

_POLL_S = 0.5
#: Maximum time for the client to read the output.
_SEND_LIMIT_S = 60.0


class _Client:
    """Input and output of pdb. A lost client ends the input, and discards the output."""

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, address: str) -> None:
        self._socket = connect_to_own_process(address)
        self._socket.settimeout(_SEND_LIMIT_S)
        # A forked data worker must not keep the connection open.
        os.register_at_fork(after_in_child=self._socket.close)
        self._received = b""

    @property
    def is_connected(self) -> bool:
        """True until the client exits."""
        with suppress(OSError, ValueError):  # The socket may just have been closed.
            return not self._is_readable(0.0) or bool(self._socket.recv(1, socket.MSG_PEEK))
        return False

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._socket.sendall(text.encode(self.encoding, self.errors))

    def flush(self) -> None:
        """Do nothing: nothing is buffered."""

    def readline(self) -> str:
        """Return a line; an empty string at the end of the input, or when the run must stop."""
        with suppress(OSError, ValueError):  # The socket may just have been closed.
            while b"\n" not in self._received:
                if (number := pending_stop_signal()) is not None:
                    self.write(f"\nThe run must stop ({number.name}). Detaching.\n")
                    return ""
                if self._is_readable(_POLL_S):
                    if not (data := self._socket.recv(65536)):
                        return ""
                    self._received += data
        line, newline, self._received = self._received.partition(b"\n")
        return (line + newline).decode(self.encoding, self.errors)

    def close(self) -> None:
        self._socket.close()

    def _is_readable(self, timeout_s: float) -> bool:
        poll = select.poll()  # select() fails with more than 1,024 open files
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(1000 * timeout_s))


class DebugSession(pdb.Pdb):
    """pdb whose end lets the program continue."""

    def __init__(self, address: str) -> None:
        """Connect to the client.

        Raises:
            OSError: no client of this user listens at this address.
        """
        self.client = _Client(address)
        stream: Any = self.client
        super().__init__(stdin=stream, stdout=stream, nosigint=True)
        self.is_stopped = self.has_ended = self._is_traced = False

    def stop_at(self, frame: FrameType | None) -> None:
        """Read commands while the program is at `frame`."""
        self.set_trace(frame)
        sys.settrace(None)  # The calls below are not part of the program.
        self._is_traced = True
        self.interaction(frame, None)
        if self._is_traced:
            sys.settrace(self.trace_dispatch)

    def set_continue(self) -> None:
        """Continue, without the cost of tracing if there are no breakpoints."""
        super().set_continue()
        self._is_traced = bool(self.breaks)

    def interaction(self, frame: FrameType | None, traceback: TracebackType | None) -> None:
        """Read commands until one continues the program. An error ends the session, not the program."""
        self.is_stopped = True
        try:
            super().interaction(frame, traceback)
        except BaseException as error:
            self.message(f"\nDetaching because of {type(error).__name__}: {error}")
            self.do_detach("")
            if not isinstance(error, Exception):
                raise  # A stop signal ends the program.
            print(f"hpctrain: the debugger failed: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            self.is_stopped = False

    def do_detach(self, arg: str) -> bool:  # noqa: ARG002 (the signature of commands)
        """Remove all breakpoints, end the debugger, and continue the program. See also `quit`."""
        self.has_ended = True
        self.clear_all_breaks()
        self.set_continue()
        self.client.close()
        return True

    do_q = do_quit = do_exit = do_EOF = do_detach  # noqa: N815 (pdb's name)

    def do_run(self, arg: str) -> None:  # noqa: ARG002
        """Refuse to restart the program."""
        self.message("The debugger cannot restart a rank. To restart the run, use `hpctrain requeue`.")

    do_restart = do_run
