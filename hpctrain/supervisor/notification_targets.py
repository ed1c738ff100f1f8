"""Targets of notifications: a URL that receives JSON, or a shell command."""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from hpctrain import system
from hpctrain.spec.notify import is_address

log = logging.getLogger(__name__)

#: Time limits in seconds for a command and for a request, attempts to connect, and seconds between attempts.
_TARGET_LIMIT_S, _ANSWER_LIMIT_S, _TRIES, _PAUSE_S = 30.0, 8.0, 3, 2.0
#: Maximum number of messages queued for a target; further messages are dropped.
_MAX_WAITING = 50


class NotificationTarget:
    """A URL or a shell command with a separate thread, so that a hanging target does not delay others."""

    def __init__(self, target: str, environ: Mapping[str, str]) -> None:
        self._target, self._environ = target, environ
        self._running: system.Popen[bytes] | None = None
        self._messages: system.SimpleQueue[Mapping[str, Any] | None] = system.SimpleQueue()
        self._thread = system.Thread(target=self._deliver_all, name="hpctrain-notification", daemon=True)
        self._thread.start()

    def enqueue(self, message: Mapping[str, Any]) -> None:
        """Queue a message for sending; drop it if the queue is full."""
        if self._messages.qsize() < _MAX_WAITING:
            self._messages.put(message)
        else:
            log.warning(
                "dropped a notification (event: %s), because the target was too slow", message["occasion"]
            )

    def close(self) -> None:
        """Accept no further messages."""
        self._messages.put(None)

    def wait(self, deadline: float) -> None:
        """Wait until all messages are sent, or until `deadline` on the monotonic clock."""
        self._thread.join(max(0.05, deadline - system.monotonic()))
        if self._thread.is_alive():
            log.warning(
                "a notification was not delivered before the supervisor exited, because the target was too "
                "slow"
            )
            if (process := self._running) is not None:
                _kill(process)
                self._thread.join(0.2)

    def _set_process(self, process: system.Popen[bytes]) -> None:
        self._running = process

    def _deliver_all(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                if is_address(self._target):
                    post_json(self._target, message)
                else:
                    run_notification_command(self._target, message, self._environ, self._set_process)
            except Exception as error:  # noqa: BLE001 (a target must not end the supervisor)
                log.warning(
                    "a notification (event: %s) was not delivered: %s: %s",
                    message["occasion"],
                    type(error).__name__,
                    error,
                )
            else:
                log.info("sent a notification (event: %s)", message["occasion"])


class _NotConnectedError(OSError):
    """No connection, so nothing was sent."""


class _DeadlineConnection(http.client.HTTPConnection):
    """A connection with a time limit for the complete response; a socket timeout restarts with each byte."""

    def connect(self) -> None:
        try:
            super().connect()
        except OSError as error:
            raise _NotConnectedError(str(error)) from error

    def getresponse(self) -> http.client.HTTPResponse:
        limit_s, begun = _ANSWER_LIMIT_S, system.monotonic()
        timer = system.Timer(limit_s, _shut_down, (self.sock,))
        timer.daemon = True
        timer.start()
        try:
            return super().getresponse()
        except (OSError, http.client.HTTPException):
            if system.monotonic() - begun >= limit_s:
                raise TimeoutError(f"no complete response within {limit_s:g} s") from None
            raise
        finally:
            timer.cancel()


class _DeadlineTlsConnection(_DeadlineConnection, http.client.HTTPSConnection):
    """A connection over TLS with the same time limit."""


def _shut_down(connection: socket.socket) -> None:
    """Abort all reads from a connection, in any thread, without a TLS shutdown."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_DeadlineConnection, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_DeadlineTlsConnection, req)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error: messages are sent only to the given URL."""

    def http_error_302(self, *_: Any, **__: Any) -> None:
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def post_json(address: str, message: Mapping[str, Any]) -> None:
    """POST a message as JSON, at most once: only a failed connection is tried again."""
    opener = urllib.request.build_opener(_Connections, _NoRedirects)
    data = json.dumps(message).encode()
    for left in reversed(range(_TRIES)):
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
        try:
            with opener.open(request, timeout=_ANSWER_LIMIT_S):
                return
        except urllib.error.HTTPError as error:
            error.close()
            raise OSError(f"the server returned HTTP status {error.code}") from None
        except http.client.HTTPException as error:
            raise OSError(f"the response is not valid HTTP ({type(error).__name__})") from None
        except urllib.error.URLError as error:
            if not left or not isinstance(error.reason, _NotConnectedError):
                raise
        system.sleep(_PAUSE_S)


def run_notification_command(
    line: str,
    message: Mapping[str, Any],
    environ: Mapping[str, str],
    set_process: Callable[[system.Popen[bytes]], None] | None = None,
) -> None:
    """Run a shell command in the run folder.

    The command receives the message on standard input, and the main fields also in environment variables.
    `set_process` is called with the process immediately after the start.
    """
    variables = {
        "HPCTRAIN_OCCASION": str(message["occasion"]),
        "HPCTRAIN_TEXT": str(message["text"]).replace("\0", ""),
    }
    with system.Popen(
        ["/bin/sh", "-c", line],
        cwd=message["folder"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**environ, **variables},
        start_new_session=True,
    ) as process:
        if set_process is not None:
            set_process(process)
        try:
            _, errors = process.communicate(json.dumps(message).encode(), timeout=_TARGET_LIMIT_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise OSError(f"the command took longer than {_TARGET_LIMIT_S:.0f} s") from None
    if process.returncode:
        output = errors.decode(errors="replace")[-300:].rstrip()
        raise OSError(f"the command exited with code {process.returncode}" + (output and f": {output}"))


def _kill(process: system.Popen[bytes]) -> None:
    """Kill a command and its child processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
