"""Notify webhooks and commands about a run that has ended, failed or stalled."""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from hpctrain import system
from hpctrain.errors import SpecError
from hpctrain.files import file_size
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.jobspec.notify import NotifyConfig, is_address
from hpctrain.record_types import Event, StepRecord
from hpctrain.records.checkpoint_health import full_disk
from hpctrain.records.log_tail import RecordTail, read_last_records
from hpctrain.rundir import RunDir

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
#: Time to deliver pending messages when the job ends.
_LAST_LIMIT_S = 35.0
_MAX_CAUSE = 500
#: Time limits in seconds for a command and for a request, attempts to connect, and seconds between attempts.
_TARGET_LIMIT_S, _ANSWER_LIMIT_S, _TRIES, _PAUSE_S = 30.0, 8.0, 3, 2.0


@contextmanager
def send_notifications(run: RunDir, environ: Mapping[str, str]) -> Iterator[None]:
    """Notify the targets in the run's specification about events during the block."""
    try:
        notify = load_spec(run.spec).notify
    except SpecError:
        notify = NotifyConfig()  # Invalid specifications are reported elsewhere.
    if not notify.targets:
        yield
        return
    notifier = Notifier(run, notify, environ)
    thread = system.Thread(target=notifier.run, name="hpctrain-notifications", daemon=True)
    thread.start()
    try:
        yield
    finally:
        notifier.ended.set()
        thread.join(_LAST_LIMIT_S)
        if thread.is_alive():
            log.warning("a notification was not delivered before the supervisor exited: slow target")
            notifier.kill_command()


class Notifier:
    """Reads the run's records, except those that already exist, and sends notifications about them."""

    def __init__(self, run: RunDir, notify: NotifyConfig, environ: Mapping[str, str]) -> None:
        self._run, self._notify, self._environ = run, notify, environ
        #: The running command.
        self.process: system.Popen[bytes] | None = None
        self._events, self._logged_bytes = RecordTail(run.events, Event), file_size(run.metrics)
        self._last_error: str | None = None
        self._disk_reported = False
        self._not_before = 0.0
        try:
            while self._events.read():
                pass
        except OSError:
            self._not_before = system.time()
        self.ended = system.Event()
        self._stall = StallDetector(notify.stall_s)

    def run(self) -> None:
        """Send notifications until the block has ended and all are delivered."""
        while not self.ended.wait(_POLL_INTERVAL_S):
            self._check_with_retries()
        self._check_with_retries()

    def _check_with_retries(self) -> None:
        """Check the records; if a file cannot be read, for example on a disk error, retry later."""
        try:
            self._check_records()
        except OSError as error:
            if self._last_error != str(error):
                self._last_error = str(error)
                log.warning("cannot read the run's events, so notifications are delayed: %s", error)
        else:
            self._last_error = None

    def _check_records(self) -> None:
        size, logged_by = file_size(self._run.metrics), None
        if size != self._logged_bytes:
            newest = next(read_last_records(self._run.metrics, StepRecord), None)
            logged_by = None if newest is None else newest.attempt
        self._logged_bytes = size
        now = system.monotonic()
        # A full disk cannot record an event.
        if not self._disk_reported and (full := full_disk(self._run)) is not None:
            self._disk_reported = True
            self._send("stall", f"{full}; the run cannot save until space is freed")
        for event in self._events.read():
            if event.time >= self._not_before:
                self._stall.on_event(event, now)
                self._send(notification_kind(event), event.cause, event)
        if (seconds := self._stall.find_stall(now, logged_by)) is not None:
            self._send("stall", f"no step has been logged for {seconds:.0f} s")

    def _send(self, occasion: str | None, cause: str | None, event: Event | None = None) -> None:
        if occasion not in self._notify.on:
            return
        message = notification_message(self._run, occasion, cause or "", event)
        for target in self._notify.targets:
            try:
                if is_address(target):
                    post_json(target, message)
                else:
                    self._run_command(target, message)
            except Exception as error:  # noqa: BLE001 (a target must not end the supervisor)
                problem = f"{type(error).__name__}: {error}"
                log.warning("a notification (event: %s) was not delivered: %s", occasion, problem)
            else:
                log.info("sent a notification (event: %s)", occasion)

    def _run_command(self, line: str, message: Mapping[str, Any]) -> None:
        """Run a shell command in the run folder, with the message on standard input."""
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
            env={**self._environ, **variables},
            start_new_session=True,
        ) as process:
            self.process = process
            try:
                _, errors = process.communicate(json.dumps(message).encode(), timeout=_TARGET_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill_command()
                raise OSError(f"the command took longer than {_TARGET_LIMIT_S:.0f} s") from None
            finally:
                self.process = None
        if process.returncode:
            output = errors.decode(errors="replace")[-300:].rstrip()
            raise OSError(f"the command exited with code {process.returncode}" + (output and f": {output}"))

    def kill_command(self) -> None:
        """Kill the running command, if any, and its child processes."""
        if (process := self.process) is not None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def notification_kind(event: Event) -> str | None:
    match event.kind:
        case "finished":
            return "finish"
        case "failure" if event.rank is not None:
            return "stall" if event.end_kind == "hang" else "failure"
        case "failure" if event.end_kind == "disk-full":
            return "stall"
    return None


def notification_message(run: RunDir, occasion: str, cause: str, event: Event | None) -> dict[str, Any]:
    """Return the message; chat services show either `text` or `content`."""
    cause, fields = cause[:_MAX_CAUSE], event.fields() if event is not None else {}
    if occasion == "finish":
        summary = f"Run {run.run_id} has ended ({fields['state']})"
    else:
        summary = f"Run {run.run_id} has stalled" if occasion == "stall" else f"Failure in run {run.run_id}"
    text = f"{summary}: {cause}" if cause else f"{summary}."
    shown = ("state", "attempt", "rank", "host", "log")
    details: dict[str, Any] = {name: fields[name] for name in shown if name in fields}
    about = {"run_id": run.run_id, "folder": str(run.path), "time": fields.get("time", system.time())}
    return {"occasion": occasion, "text": text, "content": text, "cause": cause, **about, **details}


class StallDetector:
    """Detects that an attempt has stopped logging steps; reports each stall once."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._attempt: int | None = None
        self._ended = self._reported = False

    def on_event(self, event: Event, now: float) -> None:
        match event.kind:
            case "started":
                self._since, self._attempt, self._ended = None, event.attempt, False
            case "failure" | "signal" | "finished" | "requeue":
                self._since, self._ended = None, True
            case "checkpoint" if self._since is not None:
                self._since = now

    def find_stall(self, now: float, logged_by: int | None) -> float | None:
        """Return the duration of an unreported stall; `logged_by` is the attempt with new steps, if any."""
        is_current = self._attempt is None or logged_by == self._attempt
        if logged_by is not None and is_current and not self._ended:
            self._since, self._reported = now, False
        if self._since is None or self._reported or now - self._since < self._limit_s:
            return None
        self._reported = True
        return now - self._since


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error: messages are sent only to the given URL."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def post_json(address: str, message: Mapping[str, Any]) -> None:
    """POST a message as JSON; only a failed connection is tried again, and errors hide URL and response."""
    opener = urllib.request.build_opener(_NoRedirects)
    data = json.dumps(message).encode()
    for tries_left in reversed(range(_TRIES)):
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
        try:
            with opener.open(request, timeout=_ANSWER_LIMIT_S):
                return
        except urllib.error.HTTPError as error:
            error.close()
            raise OSError(f"the server returned HTTP status {error.code}") from None
        except http.client.HTTPException as error:
            raise OSError(f"the response is not valid HTTP ({type(error).__name__})") from None
        except urllib.error.URLError:
            # Errors after the request was sent are not wrapped in URLError.
            if not tries_left:
                raise
        system.sleep(_PAUSE_S)
