"""Connect a rank to its supervisor, for heartbeats, requests and the start message.

Training continues without a connection: the heartbeat thread raises no exception.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from typing import Any

from hpctrain.authentication import new_nonce, sign_connection
from hpctrain.cluster import Ranks
from hpctrain.errors import Unauthenticated
from hpctrain.files import parse_json_object
from hpctrain.runtime.rank_activity import activity
from hpctrain.runtime.stopping.signal_recorder import report_stop_signal

_CONNECT_LIMIT_S = 10.0
#: The longest line is the start message, with all variables of an attempt.
_MAX_LINE = 1 << 22
#: Maximum number of connections, each opened after the loss of the last, such as in a flood of foreign
#: connections.
_MAX_CONNECTIONS, _PAUSE_S = 10, 1.0
#: Maximum delay of an exit by a heartbeat that cannot be sent.
_EXIT_LIMIT_S = 1.0
#: Seconds between two heartbeats; longer with very many ranks, because one process receives all of them.
_BEAT_INTERVAL_S, _RANKS_PER_BEAT_S = 1.0, 1000

#: A process that wakes up later was suspended, unless it used the CPU, or its heartbeat thread waited for the
#: GIL, for more than this share of the time.
_SUSPENDED_S, _BUSY_SHARE = 10.0, 0.1
#: Linux counts the context switches of each thread.
_RUSAGE_SCOPE = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)

Message = dict[str, Any]
_Times = tuple[float, float, float, float]


class Connection:
    """An open connection of JSON lines. Several threads may send. A lost peer raises an OSError."""

    heartbeat_interval_s = _BEAT_INTERVAL_S

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._received = connected, b""
        self._sending = threading.Lock()

    def send(self, message: Message, limit_s: float = -1) -> None:
        """Send a message, unless another thread has been sending for `limit_s` seconds."""
        if self._sending.acquire(timeout=limit_s):
            try:
                self._socket.sendall(self._seal(message))
            finally:
                self._sending.release()

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """Return the next message; None after the time limit."""
        line = self._line(timeout_s)
        return None if line is None else self._open(line)

    def close(self) -> None:
        self._socket.close()

    def _seal(self, message: Message) -> bytes:
        return json.dumps(message).encode("ascii") + b"\n"

    def _open(self, line: bytes) -> Message:
        return parse_json_object(line, "a received line")

    def _line(self, timeout_s: float | None) -> bytes | None:
        poll = select.poll()  # `select` would reject descriptors from 1024
        poll.register(self._socket, select.POLLIN)
        while b"\n" not in self._received:
            if len(self._received) > _MAX_LINE:
                raise ConnectionAbortedError(f"received a line of more than {_MAX_LINE} bytes")
            if timeout_s is not None and not poll.poll(timeout_s * 1000):
                return None
            if not (data := self._socket.recv(65536)):
                raise ConnectionResetError("the peer closed the connection")
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line


class SupervisorConnection(Connection):
    """A connection to the supervisor at ADDRESS:PORT:SECRET, with an authentication code in each line."""

    def __init__(
        self, supervisor: str, ranks: Ranks, attempt: int, group: Mapping[str, object] | None = None
    ) -> None:
        """Connect, and introduce this rank, in a process group of a batch script with the group's facts."""
        address, port, secret = supervisor.rsplit(":", 2)
        super().__init__(socket.create_connection((address, int(port)), timeout=_CONNECT_LIMIT_S))
        try:
            server_nonce, nonce = self._line(_CONNECT_LIMIT_S), new_nonce()
            if server_nonce is None:
                raise TimeoutError(f"the supervisor did not respond within {_CONNECT_LIMIT_S:g} s")
            self._socket.settimeout(None)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._up, self._down = sign_connection(secret.encode(), server_nonce, nonce)
            self.heartbeat_interval_s = max(_BEAT_INTERVAL_S, ranks.world_size / _RANKS_PER_BEAT_S)
            introduction = self._up.seal({"attempt": attempt, "rank": ranks.rank, **(group or {})})
            self._socket.sendall(nonce + b"\n" + introduction)
        except BaseException:
            self._socket.close()
            raise

    def _seal(self, message: Message) -> bytes:
        return self._up.seal(message)

    def _open(self, line: bytes) -> Message:
        return self._down.open(line)


def _times() -> _Times:
    # A thread that waits for the GIL wakes up after each switch interval.
    gil_s = resource.getrusage(_RUSAGE_SCOPE).ru_nvcsw * sys.getswitchinterval()
    return time.time(), time.monotonic(), time.process_time(), gil_s


def _find_pause(before: _Times, expected_s: float) -> tuple[float, float] | None:
    """Return the seconds for which this process was suspended, by the system clock and the monotonic clock.

    Only the system clock runs while the machine sleeps. A thread may also wake up late because native code
    holds the GIL: it computes, or waits for a file.
    """
    clock_s, monotonic_s, cpu_s, gil_s = (end - begin for begin, end in zip(before, _times(), strict=True))
    late_s = max(clock_s, monotonic_s) - expected_s
    if late_s < _SUSPENDED_S or max(cpu_s, gil_s) > _BUSY_SHARE * late_s:
        return None
    return round(clock_s - expected_s, 1), round(monotonic_s - expected_s, 1)


#: The connection of the heartbeats.
_open: list[Connection] = []


def announce_exit() -> None:
    """Tell the supervisor that this process exits by itself: otherwise, it was killed, or has crashed."""
    for connection in _open:
        with suppress(OSError):
            connection.send({"exits": True, "step": activity.step}, _EXIT_LIMIT_S)


def start_heartbeat(
    connect: Callable[[], Connection],
    heartbeat_message: Callable[[], Message | None],
    on_message: Callable[[Connection, Message], None],
) -> None:
    """Start a thread that sends heartbeats, none while there is no message, and receives messages."""

    def use(connection: Connection) -> None:
        # Otherwise, a child forked by the script would keep the connection open after the exit of this rank.
        os.register_at_fork(after_in_child=connection.close)
        _open[:] = [connection]
        report_stop_signal(lambda number: connection.send({"stop_signal": number.name}))
        previous: Message | None = None
        pause = None
        while True:
            message = heartbeat_message()
            if message is not None:
                if pause is not None:
                    message["paused"] = pause
                # Without changes, an empty message is sent, to show that this process is alive.
                connection.send({} if message == previous else message)
                previous = message
            before = _times()
            received = connection.receive(connection.heartbeat_interval_s)
            pause = _find_pause(before, connection.heartbeat_interval_s)
            if received is not None:
                on_message(connection, received)

    def reconnect() -> None:
        for _ in range(_MAX_CONNECTIONS):
            try:
                with closing(connect()) as connection:
                    use(connection)
            except (OSError, ValueError, Unauthenticated) as error:
                problem = error
            time.sleep(_PAUSE_S)
        print(
            f"hpctrain: no connection to the supervisor: {str(problem) or type(problem).__name__}. "
            "Training continues without a connection.",
            file=sys.stderr,
        )

    threading.Thread(target=reconnect, name="hpctrain-heartbeat", daemon=True).start()
