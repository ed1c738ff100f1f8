"""Serve pages to the browser of one user, on this machine only."""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
from collections import deque
from contextlib import suppress
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote, urlsplit

from hpctrain.errors import HpctrainError
from hpctrain.telemetry.report.pages import page_url

#: Seconds after which an idle connection is closed, and maximum number of connections.
_IDLE_S, _MAX_CONNECTIONS = 30.0, 32
#: Maximum number of compared runs.
_MAX_COMPARED = 50
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # One response per connection, so that no unused connections remain open.
    "Connection": "close",
}


class PageSource(Protocol):
    """Source of the served pages. It must use a requested run id only to look up a run, not as a path."""

    def tag(self, run_ids: tuple[str, ...]) -> str | None:
        """Return a tag that changes with the page, or None for an unknown run. No id means all runs."""

    def page(self, run_ids: tuple[str, ...]) -> str:
        """Return the page, or raise LookupError if the run no longer exists."""


class PageServer(ThreadingHTTPServer):
    """Server that requires a token and accepts only local host names."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, pages: PageSource, host: str, port: int) -> None:
        """Listen on a port; 0 selects a free port."""
        super().__init__((host, port), _Handler)
        self._connections: deque[Any] = deque()
        self.pages, self.token = pages, secrets.token_urlsafe(24)
        self.port = self.server_address[1]
        # Other host names are rejected, against DNS rebinding by a foreign page.
        self.hosts = {f"{name}:{self.port}" for name in ("127.0.0.1", "localhost")}
        self.cookie = f"hpctrain-{self.port}"

    @property
    def address(self) -> str:
        """URL for the browser; the server converts the token in the URL to a cookie."""
        return f"http://127.0.0.1:{self.port}/?token={self.token}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a connection in a thread. If there are too many, close the oldest one."""
        self._connections.append(request)
        if len(self._connections) > _MAX_CONNECTIONS:
            # Its thread then ends. The connection may already be closed.
            with suppress(OSError):
                self._connections.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of closed connections."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _RequestRefused(Exception):
    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "hpctrain", ""
    timeout = _IDLE_S

    def do_GET(self) -> None:
        try:
            self._serve()
        except _RequestRefused as refusal:
            self._send(refusal.status, str(refusal))
        except ValueError:
            self._send(HTTPStatus.BAD_REQUEST, "Invalid URL.")
        except LookupError:
            self._send(HTTPStatus.NOT_FOUND, "This run no longer exists.")
        except OSError as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, f"The run cannot be read: {error.strerror}.")
        except HpctrainError as error:
            self._send(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))

    def do_HEAD(self) -> None:
        self.do_GET()

    def __getattr__(self, name: str) -> object:
        """Refuse all other methods, which `http.server` looks up by name."""
        if name.startswith("do_"):
            return lambda: self._send(HTTPStatus.METHOD_NOT_ALLOWED, "Use GET.", Allow="GET, HEAD")
        raise AttributeError(name)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: URLs may contain the token."""

    def _serve(self) -> None:
        host, origin = self.headers.get("Host"), self.headers.get("Origin")
        if host not in self.server.hosts:
            raise _RequestRefused(HTTPStatus.FORBIDDEN, f"Unknown host {host!r}. Use 127.0.0.1 or localhost.")
        is_foreign = self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
        if is_foreign or origin not in (None, f"http://{host}"):
            raise _RequestRefused(HTTPStatus.FORBIDDEN, "Requests from other sites are not allowed.")
        if not self.path.startswith("/"):
            raise _RequestRefused(HTTPStatus.NOT_FOUND, "Page not found.")
        url = urlsplit(self.path)
        query = parse_qs(url.query, max_num_fields=_MAX_COMPARED + 10)
        if self._is_token(query.get("token", [""])[0]):
            cookie = f"{self.server.cookie}={self.server.token}; HttpOnly; SameSite=Strict; Path=/"
            # Built from the run ids, so that the request does not determine the target of the redirect.
            location = page_url(_run_ids(url.path, query))
            self._send(HTTPStatus.SEE_OTHER, "", Location=location, Set_Cookie=cookie)
            return
        try:
            cookie_value = SimpleCookie(self.headers.get("Cookie", "")).get(self.server.cookie)
        except CookieError:
            cookie_value = None
        bearer = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if not (self._is_token(bearer) or (cookie_value and self._is_token(cookie_value.value))):
            raise _RequestRefused(
                HTTPStatus.FORBIDDEN, "Access requires a token. Open the URL printed by hpctrain serve."
            )
        run_ids = _run_ids(url.path, query)
        if (tag := self.server.pages.tag(run_ids)) is None:
            raise _RequestRefused(HTTPStatus.NOT_FOUND, "Run not found.")
        if self.headers.get("If-None-Match") == f'"{tag}"':
            self._send(HTTPStatus.NOT_MODIFIED, "", ETag=f'"{tag}"')
        else:
            self._send(HTTPStatus.OK, self.server.pages.page(run_ids), kind="text/html", ETag=f'"{tag}"')

    def _is_token(self, text: str) -> bool:
        return hmac.compare_digest(text.encode(), self.server.token.encode())

    def _send(self, status: HTTPStatus, text: str, kind: str = "text/plain", **headers: str) -> None:
        body = text.encode("utf-8", "replace")
        self.close_connection = True
        self.send_response(status)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _run_ids(path: str, query: dict[str, list[str]]) -> tuple[str, ...]:
    """Return the run ids of an address; empty for the list of all runs."""
    if path == "/":
        return ()
    if path == "/compare":
        run_ids = tuple(dict.fromkeys(query.get("run", [])))
        if len(run_ids) < 2:
            raise _RequestRefused(HTTPStatus.NOT_FOUND, "Select at least two runs.")
        return run_ids
    folder, _, run_id = path.rpartition("/")
    if folder != "/run" or not run_id:
        raise _RequestRefused(HTTPStatus.NOT_FOUND, "Page not found.")
    return (unquote(run_id),)
