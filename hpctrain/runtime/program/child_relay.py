"""Relay between the supervisor and the Python processes of a command.

A Python process of a command, such as a shell script, reports like a rank (`runtime/child_process.py`), but
to the worker. The worker sends the messages of one of these processes to the supervisor: the first that
completes optimizer steps, or else the first that imported torch. Without such a process, the worker reports
on itself.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from hpctrain.cluster import Ranks
from hpctrain.rundir import CHILD_VARIABLE
from hpctrain.runtime.supervisor_connection import Connection, Message

#: The folder with the hook that Python runs at its start.
_HOOK_FOLDER = Path(__file__).with_name("startup_hook")
#: struct ucred of unix(7): pid, uid, gid.
_CREDENTIALS = struct.Struct("3i")


def connect_to_worker(name: str) -> Connection:
    """Return a connection of a process of the command to the worker."""
    return Connection(connect_to_own_process(name))


def connect_to_own_process(name: str) -> socket.socket:
    """Return a connection to a process of this user that listens at an abstract address."""
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(f"\0{name}")
    if not is_own_process(connected):
        connected.close()
        raise PermissionError(f"the socket {name} belongs to another user")
    return connected


def is_own_process(connected: socket.socket) -> bool:
    """Return true if the peer is a process of the same user."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(credentials)[1] == os.getuid())


class ChildRelay:
    """Socket for the Python processes of the command. Only processes of the same user can connect."""

    def __init__(
        self,
        ranks: Ranks,
        heartbeat_message: Callable[[], Message],
        on_message: Callable[[Connection, Message], None],
    ) -> None:
        """Start to listen."""
        self._ranks, self._own_heartbeat, self._handle = ranks, heartbeat_message, on_message
        self._changed = threading.Condition()
        #: The last heartbeat of each connected process; empty before the first.
        self._children: dict[Connection, Message] = {}
        self._supervisor: Connection | None = None
        # An abstract address (unix(7)), which needs no file.
        self._name = f"hpctrain-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"\0{self._name}")
        self._socket.listen()
        threading.Thread(target=self._accept, name="hpctrain-children", daemon=True).start()

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the command."""
        ranks = {name: value for name, value in vars(self._ranks).items() if name != "sources"}
        paths = [str(_HOOK_FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        told = json.dumps({"socket": self._name, "ranks": ranks})
        return {CHILD_VARIABLE: told, "PYTHONPATH": os.pathsep.join(paths)}

    def heartbeat_message(self) -> Message:
        """Return the heartbeat of the observed process, or of the worker."""
        _, heartbeat = self._observed()
        # Standby workers must not import the modules of the command.
        return {**heartbeat, "modules": []} if heartbeat else self._own_heartbeat()

    def on_message(self, connection: Connection, message: Message) -> None:
        """Pass a message of the supervisor to the observed process, or handle it in the worker."""
        self._supervisor = connection
        child, _ = self._observed()
        if child is None:
            self._handle(connection, message)
        else:
            with suppress(OSError):
                child.send(message)

    def wait_until_exited(self, timeout_s: float) -> None:
        """Wait until the connected processes have exited, which may outlive their shell."""
        with self._changed:
            self._changed.wait_for(lambda: not self._children, timeout_s)

    def _observed(self) -> tuple[Connection | None, Message]:
        """Return the process whose messages the supervisor receives, and its last heartbeat."""
        with self._changed:
            known = [child for child in self._children.items() if child[1]]
        return max(known, key=lambda child: child[1]["step"] > 0, default=(None, {}))

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._socket.accept()
            except OSError as error:  # too many open files
                words = f"hpctrain: cannot monitor a process that the command started ({error}); will retry"
                print(words, file=sys.stderr)
                time.sleep(1)
                continue
            if not is_own_process(accepted):
                accepted.close()
                continue
            child = Connection(accepted)
            with self._changed:
                self._children[child] = {}
            threading.Thread(target=self._receive, args=(child,), daemon=True).start()

    def _receive(self, child: Connection) -> None:
        try:
            with closing(child), suppress(OSError, ValueError):
                while (message := child.receive()) is not None:
                    self._on_child_message(child, message)
        finally:
            with self._changed:
                del self._children[child]
                self._changed.notify_all()

    def _on_child_message(self, child: Connection, message: Message) -> None:
        if type(message.get("step")) is int:
            with self._changed:
                self._children[child] = message
        elif message and self._supervisor is not None and child is self._observed()[0]:
            with suppress(OSError):
                self._supervisor.send(message)
