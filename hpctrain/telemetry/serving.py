"""A server for one person's browser: pages that can be looked at and do nothing, on this machine only."""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from hpctrain.errors import HpctrainError

#: A browser that reads nothing of an answer for so long is let go.
_IDLE_S = 30.0
#: Who has not shown the token has so long to do so, and so many may try at once: the oldest makes room.
_STRANGER_S, _MOST_STRANGERS = 10.0, 32
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # One answer a connection: none is kept open that nobody needs.
    "Connection": "close",
}


class Pages(Protocol):
    """What is served. A run is found among those that there are: what a browser says becomes no path."""

    def tag(self, run_id: str | None) -> str | None:
        """What changes when the page does; None where there is no such run. Without an id, of all runs."""

    def page(self, run_id: str | None) -> str:
        """The page.

        Raises:
            LookupError: there is no such run any more.
        """


class Server(ThreadingHTTPServer):
    """Serves pages to whoever has the token, under names of this machine only."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, pages: Pages, host: str, port: int) -> None:
        """Begin to listen.

        Args:
            pages: what is served.
            host: an address of this machine itself.
            port: 0 takes one that is free.

        Raises:
            OSError: the port is taken.
        """
        super().__init__((host, port), _Handler)
        self._strangers: dict[Any, float] = {}
        self._strangers_lock = threading.Lock()
        self.pages, self.token = pages, secrets.token_urlsafe(24)
        self.port = self.server_address[1]
        # Another name for this machine's address would let a stranger's page pass for this one.
        self.hosts = {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost")}
        self.cookie = f"hpctrain-{self.port}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread, of which there are only so many for whoever has not shown the token yet."""
        with self._strangers_lock:
            if len(self._strangers) >= _MOST_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _hang_up(oldest)
            self._strangers[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection."""
        self.knows(request)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Let those go that have taken too long to say who they are."""
        begun_before = time.monotonic() - _STRANGER_S
        with self._strangers_lock:
            for connection, begun in self._strangers.items():
                if begun < begun_before:
                    _hang_up(connection)

    def knows(self, connection: Any) -> None:
        """Whoever is at the other end has shown the token, or has gone."""
        with self._strangers_lock:
            self._strangers.pop(connection, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has gone away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """What to open: the token in it becomes a cookie."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"


def _hang_up(connection: socket.socket) -> None:
    """End what a thread waits for; it closes the connection."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Refused(Exception):
    """A request that gets no page."""

    def __init__(self, status: HTTPStatus, words: str) -> None:
        super().__init__(words)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "hpctrain", ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def __getattr__(self, name: str) -> object:
        # Whatever else a browser may want to do to a page: nothing here can be changed.
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: an address may have the token in it."""

    def _refuse_method(self) -> None:
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "Pages can be looked at only.", {"Allow": "GET, HEAD"})

    def _answer(self) -> None:
        try:
            self._check_origin()
            if not self.path.startswith("/"):
                raise _Refused(HTTPStatus.NOT_FOUND, "There is no such page.")
            parts = urlsplit(self.path)
            if self._brings_token(parts.query):
                cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
                return self._send(HTTPStatus.SEE_OTHER, "", {"Location": "/", "Set-Cookie": cookie})
            self._check_token()
            self.server.knows(self.connection)
            run_id = _run_id(parts.path)
            if (tag := self.server.pages.tag(run_id)) is None:
                raise _Refused(HTTPStatus.NOT_FOUND, "There is no such run.")
            if self.headers.get("If-None-Match") == f'"{tag}"':
                return self._send(HTTPStatus.NOT_MODIFIED, "", {"ETag": f'"{tag}"'})
            self._send(HTTPStatus.OK, self.server.pages.page(run_id), {"ETag": f'"{tag}"'}, kind="text/html")
        except _Refused as refused:
            self._send(refused.status, str(refused))
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, "This is no address.")
        except LookupError:
            self._send(HTTPStatus.NOT_FOUND, "There is no such run any more.")
        except OSError as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"The run cannot be read: {error.strerror}.")
        except HpctrainError as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def _check_origin(self) -> None:
        """Take requests only that a page of ours, or the person at the keyboard, has made."""
        host, origin = self.headers.get("Host"), self.headers.get("Origin")
        if host not in self.server.hosts:
            raise _Refused(HTTPStatus.FORBIDDEN, f"This is not {host!r}: open it as 127.0.0.1 or localhost.")
        if origin is not None and origin != f"http://{host}":
            raise _Refused(HTTPStatus.FORBIDDEN, "Pages of others may not ask for this one.")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            raise _Refused(HTTPStatus.FORBIDDEN, "Pages of others may not ask for this one.")

    def _brings_token(self, query: str) -> bool:
        given = parse_qs(query, max_num_fields=10).get("token", [""]) if query else [""]
        return self._is_token(given[0])

    def _check_token(self) -> None:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            cookie = None
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not (self._is_token(bearer) or (cookie is not None and self._is_token(cookie.value))):
            raise _Refused(HTTPStatus.FORBIDDEN, "Open the address that hpctrain serve has printed.")

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self.server.token.encode())

    def _send(
        self, status: HTTPStatus, text: str, more: Mapping[str, str] | None = None, kind: str = "text/plain"
    ) -> None:
        body = text.encode("utf-8", "replace")
        self.close_connection = True
        self.send_response(status)
        for name, value in {**_HEADERS, **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _run_id(path: str) -> str | None:
    """The run that a path asks for; None for all runs.

    Raises:
        _Refused: it is no path of ours.
    """
    if path == "/":
        return None
    before, _, word = path.rpartition("/")
    if before != "/run" or not word:
        raise _Refused(HTTPStatus.NOT_FOUND, "There is no such page.")
    return unquote(word)
