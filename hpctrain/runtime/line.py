"""A rank's line to its supervisor: heartbeats go up; questions, and the word to begin, come down.

One connection a rank, of JSON lines. Without it training goes on: nothing in here raises.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from hpctrain.cluster import Ranks

_CONNECT_LIMIT_S = 10.0
#: Seconds between two heartbeats; more where there are very many ranks, for one process hears them all.
_BEAT_EVERY_S, _RANKS_PER_BEAT_S = 1.0, 1000

Message = dict[str, Any]


class Line:
    """An open connection to the supervisor.

    Attributes:
        every_s: seconds between two heartbeats.
    """

    def __init__(self, where: str, ranks: Ranks, attempt: int) -> None:
        """Connect, and say who is there.

        Args:
            where: ADDRESS:PORT:TOKEN, as the supervisor has it.
            ranks: who this process is.
            attempt: the start of the ranks that it belongs to.

        Raises:
            OSError: nobody answers there.
        """
        address, port, token = where.rsplit(":", 2)
        self._socket = socket.create_connection((address, int(port)), timeout=_CONNECT_LIMIT_S)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._received = b""
        self.every_s = max(_BEAT_EVERY_S, ranks.world_size / _RANKS_PER_BEAT_S)
        self.send({"token": token, "attempt": attempt, "rank": ranks.rank})

    def send(self, message: Message) -> None:
        """Send a message.

        Raises:
            OSError: the supervisor is gone.
        """
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Wait for a message; None where none has come in time.

        Raises:
            OSError: the supervisor is gone.
        """
        while b"\n" not in self._received:
            if timeout_s is not None and not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            if not (data := self._socket.recv(65536)):
                raise ConnectionResetError("the supervisor has closed the line")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        """Hang up."""
        self._socket.close()


def talk(line: Callable[[], Line], beat: Callable[[], Message], tell: Callable[[Line], None]) -> None:
    """From now on send heartbeats and answer questions, in a thread.

    Args:
        line: opens the line, which takes its time where nobody answers.
        beat: what to say.
        tell: answers the supervisor's question what this rank is doing.
    """

    def keep_on() -> None:
        try:
            opened = line()
        except OSError as error:
            print(f"hpctrain: no line to the supervisor: {error}. Training goes on without.", file=sys.stderr)
            return
        # A child that the script forks would hold the line when this rank is gone.
        os.register_at_fork(after_in_child=opened.close)
        last: Message | None = None
        with suppress(OSError, ValueError):
            while True:
                message = beat()
                # One that says nothing new is sent all the same: it says that this process lives.
                opened.send({} if message == last else message)
                last = message
                question = opened.receive(opened.every_s)
                if question is not None and "tell" in question:
                    tell(opened)

    threading.Thread(target=keep_on, name="hpctrain-line", daemon=True).start()
