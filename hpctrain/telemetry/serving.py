"""A server for one person's browser: pages that can be looked at and do nothing, on this machine only."""

from __future__ import annotations

import hmac
import secrets
import sys
from collections.abc import Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

#: A browser that says nothing for so long is let go.
_IDLE_S = 30.0
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Pages(Protocol):
    """What is served. A run is found among those that there are: what a browser says becomes no path."""

    def tag(self, run_id: str | None) -> str | None:
        """What changes when the page does; None where there is no such run. Without an id, of all runs."""

    def page(self, run_id: str | None) -> str:
        """The page."""


class Server(ThreadingHTTPServer):
    """Serves pages to whoever has the token, under names of this machine only."""

    daemon_threads = True

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
        self.pages, self.token = pages, secrets.token_urlsafe(24)
        self.port = self.server_address[1]
        # Another name for this machine's address would let a stranger's page pass for this one.
        self.hosts = {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost")}
        self.cookie = f"hpctrain-{self.port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has gone away."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def address(self) -> str:
        """What to open: the token in it becomes a cookie."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"


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
        self.close_connection = True
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
            run_id = _run_id(parts.path)
            if (tag := self.server.pages.tag(run_id)) is None:
                raise _Refused(HTTPStatus.NOT_FOUND, "There is no such run.")
            if self.headers.get("If-None-Match") == f'"{tag}"':
                return self._send(HTTPStatus.NOT_MODIFIED, "", {"ETag": f'"{tag}"'})
            self._send(HTTPStatus.OK, self.server.pages.page(run_id), {"ETag": f'"{tag}"'}, kind="text/html")
        except _Refused as refused:
            self._send(refused.status, str(refused))
        except OSError as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"The run cannot be read: {error.strerror}.")

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
