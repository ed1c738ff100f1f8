"""The connections between the supervisor and the ranks, and what programs without the secret can do there."""

from __future__ import annotations

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


class Ears:
    """A listener that notes what it hears."""

    def __init__(self) -> None:
        self.heard: queue.SimpleQueue[tuple[int, int, Mapping[str, Any]]] = queue.SimpleQueue()
        self.gone: list[tuple[int, int]] = []
        self.looks = 0

    def on_message(self, attempt: int, rank: int, message: Mapping[str, Any]) -> None:
        if "bad" in message:
            int(float(message["bad"]))
        self.heard.put((attempt, rank, message))

    def on_disconnect(self, attempt: int, rank: int) -> None:
        self.gone.append((attempt, rank))
        raise RuntimeError("a mistake of the listener's")

    def on_tick(self) -> None:
        self.looks += 1


@pytest.fixture
def ears() -> Ears:
    return Ears()


@pytest.fixture
def lines(ears: Ears, monkeypatch: pytest.MonkeyPatch) -> Iterator[HeartbeatServer]:
    monkeypatch.setattr(module, "TICK_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "_PAUSE_S", 0.05)
    with HeartbeatServer("127.0.0.1", ears) as lines:
        yield lines


def ranks(rank: int = 0) -> Ranks:
    return Ranks(rank, 2, rank, 2, 0, 1, "127.0.0.1", 1, "slurm")


def place_of(lines: HeartbeatServer) -> tuple[str, int]:
    address, port, _ = lines.variables[SUPERVISOR_ADDRESS_VARIABLE].rsplit(":", 2)
    return address, int(port)


def stranger(lines: HeartbeatServer) -> socket.socket:
    return socket.create_connection(place_of(lines), timeout=10)


def is_closed(connection: socket.socket, within_s: float = 10.0) -> bool:
    """Whether the other end closes the connection, after the nonce that it sends to all."""
    connection.settimeout(within_s)
    try:
        while connection.recv(4096):
            pass
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    return True


def works(lines: HeartbeatServer, ears: Ears) -> bool:
    """Whether a rank is heard, is answered, and the listener gets to look."""
    line = SupervisorConnection(lines.variables[SUPERVISOR_ADDRESS_VARIABLE], ranks(), 3)
    line.send({"x": 1})
    assert ears.heard.get(timeout=10) == (3, 0, {"x": 1})
    assert lines.send(3, {"tell": True}) == 1
    assert line.receive(10) == {"tell": True}
    looks = ears.looks
    wait_for(lambda: ears.looks > looks, 10, "the next look")
    line.close()
    wait_for(lambda: not lines.num_connected(3), 10, "the end of the line")
    return lines._thread.is_alive()


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
def test_what_strangers_send_is_refused_unread_and_the_ranks_are_heard_on(lines, ears, data, caplog):
    with stranger(lines) as connection:
        with suppress(OSError):
            connection.sendall(data)
        assert is_closed(connection)
    assert works(lines, ears)
    assert ears.heard.empty()
    assert "was refused" in caplog.text
    assert "127.0.0.1" in caplog.text


def test_a_stranger_that_sends_half_a_line_is_dropped_after_a_while(lines, ears, monkeypatch):
    monkeypatch.setattr(module, "_UNPROVEN_S", 0.3)
    with stranger(lines) as silent, stranger(lines) as slow:
        slow.sendall(b"0" * 10)
        assert is_closed(silent)
        assert is_closed(slow)
    assert works(lines, ears)


def test_a_flood_of_connections_leaves_room_for_ranks_and_is_reported_ten_times(
    lines, ears, monkeypatch, caplog
):
    monkeypatch.setattr(module, "_MAX_UNPROVEN", 20)
    before = SupervisorConnection(lines.variables[SUPERVISOR_ADDRESS_VARIABLE], ranks(1), 3)
    wait_for(lambda: lines.num_connected(3), 10, "a rank before the flood")
    flood = [stranger(lines) for _ in range(200)]
    assert all(is_closed(connection) for connection in flood[:180])
    before.send({"x": 2})
    assert ears.heard.get(timeout=10) == (3, 1, {"x": 2})
    before.close()
    wait_for(lambda: not lines.num_connected(3), 10, "the end of the line")
    assert works(lines, ears)
    for connection in flood:
        connection.close()
    assert caplog.text.count("was refused") == 10
    assert "further refusals are not reported" in caplog.text


def test_a_message_that_the_listener_fails_at_ends_no_other_line(lines, ears):
    bad = SupervisorConnection(lines.variables[SUPERVISOR_ADDRESS_VARIABLE], ranks(1), 3)
    bad.send({"bad": "inf"})
    with pytest.raises((ConnectionResetError, ConnectionAbortedError)):
        bad.receive(10)
    assert works(lines, ears)


def test_a_rank_with_a_number_that_is_none_ends_no_other_line(lines, ears):
    secret = lines.variables[SUPERVISOR_ADDRESS_VARIABLE].rsplit(":", 1)[1].encode()
    with stranger(lines) as connection:
        theirs, own = connection.recv(100).rstrip(b"\n"), new_nonce()
        up = Signed(secret, "up", theirs, own)
        connection.sendall(own + b"\n" + up.seal({"attempt": float("inf"), "rank": 0}))
        assert is_closed(connection)
    assert works(lines, ears)


def test_an_error_of_the_thread_itself_is_reported_and_does_not_end_it(lines, ears, monkeypatch, caplog):
    with monkeypatch.context() as patch:
        patch.setattr(lines, "_accept", lambda: 1 // 0)
        connection = stranger(lines)
        wait_for(lambda: "receiving from the ranks failed" in caplog.text, 10, "the report")
    assert works(lines, ears)
    connection.close()


def test_lines_that_are_repeated_changed_or_sent_back_are_refused():
    up, down = (Signed(b"secret", way, b"1", b"2") for way in ("up", "down"))
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


def test_a_rank_does_not_believe_a_supervisor_without_the_secret():
    """Such as the word to begin, with variables that let other code be loaded."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        opened: queue.SimpleQueue[SupervisorConnection] = queue.SimpleQueue()
        where = f"127.0.0.1:{port}:secret"
        thread = threading.Thread(target=lambda: opened.put(SupervisorConnection(where, ranks(), 0)))
        thread.start()
        connection, _ = server.accept()
        connection.sendall(new_nonce() + b"\n")
        line = opened.get(timeout=10)
        assert b"secret" not in connection.recv(4096)
        connection.sendall(b"0" * 64 + b" " + json.dumps({"go": {"PYTHONPATH": "/evil"}}).encode() + b"\n")
        with pytest.raises(Unauthenticated):
            line.receive(10)
        thread.join()
        line.close()
        connection.close()


def test_a_rank_whose_line_was_cut_opens_another(lines, ears):
    first = SupervisorConnection(lines.variables[SUPERVISOR_ADDRESS_VARIABLE], ranks(), 3)
    opened = [SupervisorConnection(lines.variables[SUPERVISOR_ADDRESS_VARIABLE], ranks(), 3), first]
    first.heartbeat_interval_s = 0.05

    def next_line() -> SupervisorConnection:
        if not opened:
            raise ConnectionRefusedError
        return opened.pop()

    start_heartbeat(next_line, lambda: {"beats": os.getpid()}, lambda line, message: None)
    assert ears.heard.get(timeout=10)[2]
    first._socket.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + 10
    while not ears.heard.get(timeout=10)[2]:
        assert time.monotonic() < deadline
