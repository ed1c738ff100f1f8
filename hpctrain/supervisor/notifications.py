"""Notifications about a run that has ended, failed or stalled, sent in parallel to the supervisor's work."""

from __future__ import annotations

import http.client
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from hpctrain.crash_output import file_size
from hpctrain.errors import SpecError
from hpctrain.records.checkpoint_health import full_disk
from hpctrain.records.log_tail import RecordTail, read_last_records
from hpctrain.rundir import RunDir, is_event
from hpctrain.spec.job_spec import JobSpec
from hpctrain.spec.notify import NotifyConfig, is_address

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
#: Seconds for a command, seconds for an address to answer, attempts per message, and seconds between them.
_TARGET_LIMIT_S, _ANSWER_LIMIT_S, _TRIES, _PAUSE_S = 30.0, 8.0, 3, 2.0
#: Time to deliver pending messages when the job ends: the longest that one target may take for one message.
_LAST_LIMIT_S = 35.0
_LONGEST_CAUSE = 500
_KILL_LIMIT_S = 3.0
#: Maximum number of messages waiting for a target; further ones are dropped.
_MOST_WAITING = 50


@contextmanager
def send_notifications(run: RunDir, environ: Mapping[str, str]) -> Iterator[None]:
    """Notify the targets of the run's specification about events inside the block.

    Args:
        run: the run folder.
        environ: environment variables for commands.
    """
    try:
        notify = JobSpec.load(run.spec).notify
    except SpecError:
        notify = NotifyConfig()  # Other code reports an invalid specification.
    if not notify.targets:
        yield
        return
    notifier = Notifier(run, notify, environ)
    thread = threading.Thread(target=notifier.run, name="hpctrain-notifications", daemon=True)
    thread.start()
    try:
        yield
    finally:
        notifier.ended.set()
        thread.join(_LAST_LIMIT_S + _KILL_LIMIT_S)


class Notifier:
    """Reads the run's records and sends notifications about them."""

    def __init__(self, run: RunDir, notify: NotifyConfig, environ: Mapping[str, str]) -> None:
        """Skip what has already been recorded."""
        self._run, self._notify = run, notify
        self._targets = [_Target(target, environ) for target in notify.targets]
        self._events, self._logged_bytes = RecordTail(run.events, is_event), file_size(run.metrics)
        self._said: str | None = None
        self._has_told_of_disk = False
        self._not_before = 0.0
        try:
            while self._events.read():
                pass
        except OSError:
            self._not_before = time.time()
        self.ended = threading.Event()
        self._stall = StallDetector(notify.stall_s)

    def run(self) -> None:
        """Send notifications until the block has ended and all are delivered, or the time limit is over."""
        while not self.ended.wait(_LOOK_EVERY_S):
            self._look_patiently()
        self._look_patiently()
        deadline = time.monotonic() + _LAST_LIMIT_S
        for target in self._targets:
            target.close()
        for target in self._targets:
            target.end(deadline)

    def _look_patiently(self) -> None:
        """Check the records; if a file cannot be read, for example on a disk error, retry later."""
        try:
            self._look()
        except OSError as error:
            if self._said != str(error):
                self._said = str(error)
                log.warning("cannot read the run's events, so no notifications are sent: %s", error)
        else:
            self._said = None

    def _look(self) -> None:
        size = file_size(self._run.metrics)
        logged_by = self._newest_attempt() if size != self._logged_bytes else None
        self._logged_bytes = size
        now = time.monotonic()
        self._look_at_disk()
        for event in self._events.read():
            if event.get("time", 0.0) < self._not_before:
                continue
            self._stall.hear(event, now)
            if (occasion := notification_kind(event)) is not None:
                self._tell(occasion, event)
        if (seconds := self._stall.look(now, logged_by)) is not None:
            self._tell("stall", {"cause": f"no step was logged for {seconds:.0f} s"})

    def _look_at_disk(self) -> None:
        """Report a full disk, once. The run cannot write an event for it."""
        if not self._has_told_of_disk and (full := full_disk(self._run)) is not None:
            self._has_told_of_disk = True
            self._tell("stall", {"cause": f"{full}: nothing can be saved until space is freed"})

    def _newest_attempt(self) -> object:
        """Return the attempt that logged the last step."""
        return next(read_last_records(self._run.metrics), {}).get("attempt")

    def _tell(self, occasion: str, event: Mapping[str, Any]) -> None:
        if occasion in self._notify.on:
            message = notification_message(self._run, occasion, event)
            for target in self._targets:
                target.tell(message)


class _Target:
    """An address or a shell command with its own thread, so that a hanging target does not delay others."""

    def __init__(self, target: str, environ: Mapping[str, str]) -> None:
        self._target, self._environ = target, environ
        self._running: subprocess.Popen[bytes] | None = None
        self._messages: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="hpctrain-notification", daemon=True)
        self._thread.start()

    def tell(self, message: Mapping[str, Any]) -> None:
        if self._messages.qsize() < _MOST_WAITING:
            self._messages.put(message)
        else:
            log.warning("dropped a %s notification: the target is too slow", message["occasion"])

    def close(self) -> None:
        """Accept no further messages."""
        self._messages.put(None)

    def end(self, deadline: float) -> None:
        """Wait until all messages are sent, or until `deadline` on the monotonic clock."""
        self._thread.join(max(0.05, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning(
                "a notification was not delivered before the supervisor ended: the target is too slow"
            )
            if (process := self._running) is not None:
                _kill(process)
                self._thread.join(0.2)

    def _note(self, process: subprocess.Popen[bytes]) -> None:
        self._running = process

    def _work(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                if is_address(self._target):
                    post_json(self._target, message)
                else:
                    run_notification_command(self._target, message, self._environ, self._note)
            except Exception as error:  # noqa: BLE001 (no target may end the supervisor)
                log.warning(
                    "a %s notification was not delivered: %s: %s",
                    message["occasion"],
                    type(error).__name__,
                    error,
                )
            else:
                log.info("sent a %s notification", message["occasion"])


class StallDetector:
    """Detects that an attempt has stopped logging steps; reports each stall once."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._attempt: object = None
        self._over = self._told = False

    def hear(self, event: Mapping[str, Any], now: float) -> None:
        """Handle an event of the run's record."""
        match event.get("kind"):
            case "started":
                self._since, self._attempt, self._over = None, event.get("attempt"), False
            case "failure" | "signal" | "finished" | "requeue":
                self._since, self._over = None, True
            case "checkpoint" if self._since is not None:
                self._since = now

    def look(self, now: float, logged_by: object) -> float | None:
        """Return the seconds since the last step if that is a stall not yet reported.

        Args:
            now: time on a monotonic clock, in seconds.
            logged_by: the attempt that has logged steps since the last call; None without any.
        """
        is_ours = self._attempt is None or logged_by == self._attempt
        if logged_by is not None and is_ours and not self._over:
            self._since, self._told = now, False
        if self._since is None or self._told or now - self._since < self._limit_s:
            return None
        self._told = True
        return now - self._since


def notification_kind(event: Mapping[str, Any]) -> str | None:
    """Return the kind of notification for an event; None if it needs none."""
    match event.get("kind"):
        case "finished":
            return "finish"
        case "failure" if event.get("rank") is not None:
            return "stall" if event.get("class") == "hang" else "failure"
        case "failure" if event.get("class") == "disk-full":
            return "stall"
    return None


def notification_message(run: RunDir, occasion: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message; chat services show `text` or, under their name for it, `content`."""
    cause = str(event.get("cause") or "")[:_LONGEST_CAUSE]
    if occasion == "finish":
        words = f"Run {run.run_id} has ended: {event.get('state')}"
    else:
        words = f"Run {run.run_id} {'has stalled' if occasion == 'stall' else 'had a failure'}"
    text = f"{words}: {cause}" if cause else f"{words}."
    known = {name: event[name] for name in ("state", "attempt", "rank", "host", "log") if name in event}
    about = {"run_id": run.run_id, "folder": str(run.path), "time": event.get("time", time.time())}
    return {"occasion": occasion, "text": text, "content": text, "cause": cause, **about, **known}


class _Limited(http.client.HTTPConnection):
    """A connection with a time limit on the whole answer; a socket's timeout restarts with each byte."""

    def getresponse(self) -> http.client.HTTPResponse:
        limit_s, begun = _ANSWER_LIMIT_S, time.monotonic()
        timer = threading.Timer(limit_s, _shut_down, (self.sock,))
        timer.daemon = True
        timer.start()
        try:
            return super().getresponse()
        except (OSError, http.client.HTTPException):
            if time.monotonic() - begun >= limit_s:
                raise TimeoutError(f"no complete response within {limit_s:g} s") from None
            raise
        finally:
            timer.cancel()


class _LimitedTls(_Limited, http.client.HTTPSConnection):
    """The same over TLS."""


def _shut_down(connection: socket.socket) -> None:
    """Abort all reads from a connection, in any thread, without a TLS shutdown."""
    with suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Limited, req)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_LimitedTls, req)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: a message goes only to the given address."""

    def http_error_302(self, *_: Any, **__: Any) -> None:
        return None

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def post_json(address: str, message: Mapping[str, Any]) -> None:
    """POST a message as JSON.

    Raises:
        OSError: it was refused. The error contains neither the address nor text from the server.
    """
    opener = urllib.request.build_opener(_Connections, _NoRedirects)
    data = json.dumps(message).encode()
    for left in reversed(range(_TRIES)):
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
        try:
            with opener.open(request, timeout=_ANSWER_LIMIT_S):
                return
        except urllib.error.HTTPError as error:
            error.close()
            failure = OSError(f"the address returned status {error.code}")
        except http.client.HTTPException as error:
            failure = OSError(f"the response is not HTTP ({type(error).__name__})")
        except OSError as error:
            failure = error
        if left:
            time.sleep(_PAUSE_S)
    raise failure


def run_notification_command(
    line: str,
    message: Mapping[str, Any],
    environ: Mapping[str, str],
    note: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> None:
    """Run a shell command in the run folder.

    The message is on its standard input, the main fields also in environment variables. `note` receives the
    process as soon as it starts.

    Raises:
        OSError: it failed, or took too long.
    """
    variables = {
        "HPCTRAIN_OCCASION": str(message["occasion"]),
        "HPCTRAIN_TEXT": str(message["text"]).replace("\0", ""),
    }
    with subprocess.Popen(
        ["/bin/sh", "-c", line],
        cwd=message["folder"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**environ, **variables},
        start_new_session=True,
    ) as process:
        if note is not None:
            note(process)
        try:
            _, errors = process.communicate(json.dumps(message).encode(), timeout=_TARGET_LIMIT_S)
        except subprocess.TimeoutExpired:
            _kill(process)
            raise OSError(f"the command took longer than {_TARGET_LIMIT_S:.0f} s") from None
    if process.returncode:
        raise OSError(
            f"the command exited with {process.returncode}: {errors.decode(errors='replace')[-300:]}"
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a command and its child processes."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
