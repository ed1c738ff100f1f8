"""Connections between supervisor and ranks, and attacks by programs without the secret."""

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
from helpers.waiting import wait_for

from hpctrain.authentication import Signed, code, new_nonce, seal
from hpctrain.cluster import Ranks
from hpctrain.errors import Unauthenticated
from hpctrain.rundir import SUPERVISOR_ADDRESS_VARIABLE
from hpctrain.runtime.supervisor_connection import SupervisorConnection, start_heartbeat
from hpctrain.supervisor.workers import heartbeat_server as module
from hpctrain.supervisor.workers.heartbeat_server import HeartbeatServer


class RecordingListener:
    """A listener that records all messages."""

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[tuple[int, int, Mapping[str, Any]]] = queue.SimpleQueue()
        self.disconnected: list[tuple[int, int]] = []
        self.ticks = 0

    def on_message(self, attempt: int, rank: int, message: Mapping[str, Any]) -> None:
        if "bad" in message:
            int(float(message["bad"]))
        self.messages.put((attempt, rank, message))

    def on_disconnect(self, attempt: int, rank: int) -> None:
        self.disconnected.append((attempt, rank))
        raise RuntimeError("a mistake of the listener's")

    def on_tick(self) -> None:
        self.ticks += 1


@pytest.fixture
def listener() -> RecordingListener:
    return RecordingListener()


@pytest.fixture
def server(listener: RecordingListener, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeartbeatServer]:
    monkeypatch.setattr(module, "TICK_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "_PAUSE_S", 0.05)
    with HeartbeatServer("127.0.0.1", listener) as server:
        yield server


def ranks(rank: int = 0) -> Ranks:
    return Ranks(rank, 2, rank, 2, 0, 1, "127.0.0.1", 1, "slurm")


def is_closed(connection: socket.socket, within_s: float = 10.0) -> bool:
    """True if the other end closes the connection, after the nonce that it always sends."""
    connection.settimeout(within_s)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def works(server: HeartbeatServer, listener: RecordingListener) -> bool:
    """True if a rank's message arrives and is answered, and the listener's tick runs."""
    connection = SupervisorConnection(server.variables[SUPERVISOR_ADDRESS_VARIABLE], ranks(), 3)
    connection.send({"x": 1})
    assert listener.messages.get(timeout=120) == (3, 0, {"x": 1})
    assert server.send(3, {"tell": True}) == 1
    assert connection.receive(10) == {"tell": True}
    ticks = listener.ticks
    wait_for(lambda: listener.ticks > ticks, 10, "the next look")
    connection.close()
    wait_for(lambda: not server.num_connected(3), 10, "the end of the line")
    return server._thread.is_alive()


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 60_000 + b"\n",
        b"[" * 500 + b"\n",
        b"x" * 100_000,
        b"\n" * 100_000,
        b"\xff\x00" * 100 + b"\n",
        b"0" * 32 + b"\n" + b"[" * 400 + b"\n",
        b"0" * 32 + b"\n" + b"0" * 64 + b' {"attempt": 1e999, "rank": 0}\n',
        b'{"token": "x", "attempt": 0, "rank": 0}\n',
    ],
    ids=["nested", "short-nested", "endless", "empty-lines", "binary", "unsigned", "forged", "old"],
)
def test_invalid_data_of_strangers_is_refused_unread(server, listener, data, caplog):
    address, port, _ = server.variables[SUPERVISOR_ADDRESS_VARIABLE].rsplit(":", 2)
    with socket.create_connection((address, int(port)), timeout=60) as connection:
        with suppress(OSError):
            connection.sendall(data)
        assert is_closed(connection)
    assert works(server, listener)
    assert listener.messages.empty()
    assert "was refused" in caplog.text
    assert "127.0.0.1" in caplog.text


def test_message_that_fails_the_listener_closes_only_its_connection(server, listener):
    bad = SupervisorConnection(server.variables[SUPERVISOR_ADDRESS_VARIABLE], ranks(1), 3)
    bad.send({"bad": "inf"})
    with pytest.raises((ConnectionResetError, ConnectionAbortedError)):
        bad.receive(10)
    assert works(server, listener)


def test_repeated_changed_or_reflected_lines_are_refused():
    up, down = (Signed(b"secret", direction, b"1", b"2") for direction in ("up", "down"))
    line = up.seal({"x": 1})
    with pytest.raises(Unauthenticated):
        down.open(line)
    receiver = Signed(b"secret", "up", b"1", b"2")
    assert receiver.open(line) == {"x": 1}
    with pytest.raises(Unauthenticated):
        receiver.open(line)
    with pytest.raises(Unauthenticated):
        Signed(b"secret", "up", b"1", b"2").open(line.replace(b"1}", b"2}"))
    for text in (b"[" * 60_000, b"1", b"{"):
        line = seal(code(b"secret", "up"), text, 1)
        with pytest.raises(Unauthenticated, match=r"not .*JSON"):
            Signed(b"secret", "up").open(line)


def test_rank_rejects_a_supervisor_without_the_secret():
    """For example, a start message with variables that load other code."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        opened: queue.SimpleQueue[SupervisorConnection] = queue.SimpleQueue()
        address = f"127.0.0.1:{port}:secret"
        thread = threading.Thread(target=lambda: opened.put(SupervisorConnection(address, ranks(), 0)))
        thread.start()
        connection, _ = server.accept()
        connection.sendall(new_nonce() + b"\n")
        rank_connection = opened.get(timeout=120)
        assert b"secret" not in connection.recv(4096)
        connection.sendall(b"0" * 64 + b" " + json.dumps({"go": {"PYTHONPATH": "/evil"}}).encode() + b"\n")
        with pytest.raises(Unauthenticated):
            rank_connection.receive(10)
        thread.join()
        rank_connection.close()
        connection.close()


def test_rank_reconnects_after_a_lost_connection(server, listener):
    first = SupervisorConnection(server.variables[SUPERVISOR_ADDRESS_VARIABLE], ranks(), 3)
    opened = [SupervisorConnection(server.variables[SUPERVISOR_ADDRESS_VARIABLE], ranks(), 3), first]
    first.heartbeat_interval_s = 0.05

    def next_line() -> SupervisorConnection:
        if not opened:
            raise ConnectionRefusedError
        return opened.pop()

    start_heartbeat(next_line, lambda: {"beats": os.getpid()}, lambda line, message: None)
    assert listener.messages.get(timeout=120)[2]
    first._socket.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 10
    while not listener.messages.get(timeout=120)[2]:
        assert time.monotonic() < deadline
