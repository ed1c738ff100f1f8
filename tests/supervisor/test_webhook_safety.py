"""Webhook servers with answers of an attacker or a broken proxy."""

from __future__ import annotations

import itertools
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
from helpers.waiting import slowness

from hpctrain.errors import SpecError
from hpctrain.rundir import RunDir
from hpctrain.spec.notify import NotifyConfig
from hpctrain.supervisor import notification_targets
from hpctrain.supervisor.notification_targets import post_json
from hpctrain.supervisor.notifications import Notifier

Answer = Callable[[socket.socket], None]


class Server:
    """A server that gives the same answer to each request and records the paths."""

    def __init__(self, answer: Answer, wrap: Callable[[socket.socket], socket.socket]) -> None:
        self.paths: list[str] = []
        self.over = threading.Event()
        self._answer, self._wrap = answer, wrap
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}/hook?key=sekrit-42"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, self._wrap(connection) as wrapped:
            wrapped.settimeout(20)
            self.paths.append(wrapped.recv(65536).split()[1].decode(errors="replace"))
            self._answer(wrapped)

    def close(self) -> None:
        self.over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for thread in self._threads:
            thread.join(120)


@contextmanager
def serving(
    answer: Answer, wrap: Callable[[socket.socket], socket.socket] = lambda it: it
) -> Iterator[Server]:
    server = Server(answer, wrap)
    try:
        yield server
    finally:
        server.close()


@pytest.fixture(autouse=True)
def _short_limits(monkeypatch) -> None:
    monkeypatch.setattr(notification_targets, "_ANSWER_LIMIT_S", 0.4)
    monkeypatch.setattr(notification_targets, "_PAUSE_S", 0.01)


def send_parts(*parts: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)

    return answer


def send_forever(begin: bytes, more: bytes, pause_s: float = 0.0) -> Answer:
    """Send the same data repeatedly, until the other end closes the connection."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(begin)
        for _ in itertools.count():
            connection.sendall(more)
            time.sleep(pause_s)

    return answer


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
@pytest.mark.parametrize(
    "target", ["other", "file:///etc/passwd", "ftp://127.0.0.1:9/x", "itself", "\x1b]0;x\x07"]
)
def test_redirects_are_not_followed(code, target, tmp_path):
    with serving(send_parts(b"HTTP/1.1 200 OK\r\n\r\n")) as other:
        location = {"other": other.address, "itself": "/hook?key=sekrit-42"}.get(target, target)
        answer = send_parts(
            f"HTTP/1.1 {code} Moved\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()
        )
        with serving(answer) as server, pytest.raises(OSError, match=str(code)) as error:
            post_json(server.address, {"text": "a"})
        assert server.paths == ["/hook?key=sekrit-42"]
        assert other.paths == []
    for hidden in ("sekrit", "passwd", "\x1b"):
        assert hidden not in str(error.value)


ENDLESS = {
    "slow header": send_forever(b"HTTP/1.1 200 OK\r\nX: ", b"x", 0.05),
    "status line": send_forever(b"HTTP/1.1 200 ", b"x" * 4096),
    "headers": send_forever(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 100),
    "continue": send_forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100),
    "slow continue": send_forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.05),
    "nothing": lambda connection: connection.recv(1),
    "junk": send_forever(b"", b"\xff" * 4096),
}


@pytest.mark.slow
@pytest.mark.parametrize("answer", ENDLESS.values(), ids=ENDLESS)
def test_endless_answer_is_abandoned_and_the_message_is_sent_once(answer):
    with serving(answer) as server:
        start = time.monotonic()
        message = ""
        try:
            post_json(server.address, {"text": "a"})
        except OSError as error:
            message = str(error)
        assert time.monotonic() - start < 60 * slowness()
    assert len(server.paths) == 1
    assert len(message) < 100
    assert "sekrit" not in message


BODIES = {
    "endless": send_forever(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536),
    "huge length": send_forever(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n", b"x" * 65536),
    "chunks": send_forever(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"ffff\r\n"),
    "bad length": send_parts(b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n"),
}


@pytest.mark.parametrize("answer", BODIES.values(), ids=BODIES)
def test_body_of_the_answer_is_not_read(answer):
    with serving(answer) as server:
        start = time.monotonic()
        post_json(server.address, {"text": "a"})
        assert time.monotonic() - start < 60 * slowness()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
@pytest.mark.parametrize("subject", ["/CN=127.0.0.1", "/CN=elsewhere.example"])
def test_untrusted_certificate_gets_no_message(tmp_path, subject):
    key, certificate = tmp_path / "key", tmp_path / "certificate"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", subject]
    subprocess.run(
        [*command, "-keyout", key, "-out", certificate], check=True, capture_output=True, timeout=60
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    with serving(
        send_parts(b"HTTP/1.1 200 OK\r\n\r\n"), lambda it: context.wrap_socket(it, server_side=True)
    ) as server:
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED") as error:
            post_json(server.address.replace("http:", "https:"), {"text": "a"})
        assert server.paths == []
    assert "sekrit" not in str(error.value)


def test_plain_http_instead_of_tls_is_an_error():
    with serving(send_parts(b"HTTP/1.1 200 OK\r\n\r\n")) as server, pytest.raises(OSError, match="SSL"):
        post_json(server.address.replace("http:", "https:"), {"text": "a"})


@pytest.mark.parametrize(
    "address",
    [
        "https://me:sekrit-42@127.0.0.1/hook",
        "https://sekrit-42@127.0.0.1/hook",
        "https://127.0.0.1:port/sekrit-42",
        "https://127.0.0.1:99999/sekrit-42",
        "https://[127.0.0.1/sekrit-42",
        "https://127.0.0.1/sekrit-42\x7f",
        "https://127.0.0.1/sekrit-42\x00",
    ],
)
def test_invalid_address_is_refused_without_its_secret(address):
    with pytest.raises(SpecError, match="--notify") as error:
        NotifyConfig((address,)).check()
    assert "sekrit-42" not in str(error.value)


def test_log_of_a_failure_is_one_printable_line_without_the_secret(tmp_path, caplog):
    run = RunDir(tmp_path)
    answer = send_parts(b"HTTP/1.1 500 \x1b]0;owned\x07" + b"/hook?key=sekrit-42 " * 500 + b"\r\n\r\n")
    with serving(answer) as server:
        notifier = Notifier(run, NotifyConfig((server.address,)), {})
        run.log_event("failure", 0, rank=0, cause="a cause")
        notifier.ended.set()
        notifier.run()
    (line,) = [record.getMessage() for record in caplog.records if "was not delivered" in record.getMessage()]
    assert "500" in line
    assert line.isprintable()
    assert len(line) < 300
    assert "sekrit-42" not in line
