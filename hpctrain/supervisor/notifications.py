"""Notifications about a run that has ended, failed or stalled, sent by a separate thread."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hpctrain import system
from hpctrain.errors import SpecError
from hpctrain.files import file_size
from hpctrain.records.checkpoint_health import full_disk
from hpctrain.records.log_tail import RecordTail, read_last_records
from hpctrain.rundir import RunDir, is_event
from hpctrain.spec.load_spec import load_spec
from hpctrain.spec.notify import NotifyConfig
from hpctrain.supervisor.notification_targets import NotificationTarget

log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 1.0
#: Time to deliver pending messages when the job ends: the maximum time per target and message.
_LAST_LIMIT_S = 35.0
_MAX_CAUSE = 500
_KILL_LIMIT_S = 3.0


@contextmanager
def send_notifications(run: RunDir, environ: Mapping[str, str]) -> Iterator[None]:
    """Notify the targets in the run's specification about events during the block.

    Args:
        run: the run folder.
        environ: environment variables for commands.
    """
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
        thread.join(_LAST_LIMIT_S + _KILL_LIMIT_S)


class Notifier:
    """Reads the run's records and sends notifications about them."""

    def __init__(self, run: RunDir, notify: NotifyConfig, environ: Mapping[str, str]) -> None:
        """Skip existing records."""
        self._run, self._notify = run, notify
        self._targets = [NotificationTarget(target, environ) for target in notify.targets]
        self._events, self._logged_bytes = RecordTail(run.events, is_event), file_size(run.metrics)
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
        """Send notifications until the block has ended and all are delivered, or until the time limit."""
        while not self.ended.wait(_POLL_INTERVAL_S):
            self._check_with_retries()
        self._check_with_retries()
        deadline = system.monotonic() + _LAST_LIMIT_S
        for target in self._targets:
            target.close()
        for target in self._targets:
            target.wait(deadline)

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
        size = file_size(self._run.metrics)
        logged_by = self._newest_attempt() if size != self._logged_bytes else None
        self._logged_bytes = size
        now = system.monotonic()
        self._check_disk()
        for event in self._events.read():
            if event.get("time", 0.0) < self._not_before:
                continue
            self._stall.on_event(event, now)
            if (occasion := notification_kind(event)) is not None:
                self._send(occasion, event)
        if (seconds := self._stall.find_stall(now, logged_by)) is not None:
            self._send("stall", {"cause": f"no step has been logged for {seconds:.0f} s"})

    def _check_disk(self) -> None:
        """Report a full disk once. The run cannot record an event for this."""
        if not self._disk_reported and (full := full_disk(self._run)) is not None:
            self._disk_reported = True
            self._send("stall", {"cause": f"{full}; the run cannot save until space is freed"})

    def _newest_attempt(self) -> object:
        """Return the attempt that logged the last step."""
        return next(read_last_records(self._run.metrics), {}).get("attempt")

    def _send(self, occasion: str, event: Mapping[str, Any]) -> None:
        if occasion in self._notify.on:
            message = notification_message(self._run, occasion, event)
            for target in self._targets:
                target.enqueue(message)


def notification_kind(event: Mapping[str, Any]) -> str | None:
    """Return the kind of notification for an event; None without a notification."""
    match event.get("kind"):
        case "finished":
            return "finish"
        case "failure" if event.get("rank") is not None:
            return "stall" if event.get("class") == "hang" else "failure"
        case "failure" if event.get("class") == "disk-full":
            return "stall"
    return None


def notification_message(run: RunDir, occasion: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message; chat services show either `text` or `content`."""
    cause = str(event.get("cause") or "")[:_MAX_CAUSE]
    if occasion == "finish":
        words = f"Run {run.run_id} has ended ({event.get('state')})"
    else:
        words = f"Run {run.run_id} has stalled" if occasion == "stall" else f"Failure in run {run.run_id}"
    text = f"{words}: {cause}" if cause else f"{words}."
    known = {name: event[name] for name in ("state", "attempt", "rank", "host", "log") if name in event}
    about = {"run_id": run.run_id, "folder": str(run.path), "time": event.get("time", system.time())}
    return {"occasion": occasion, "text": text, "content": text, "cause": cause, **about, **known}


class StallDetector:
    """Detects that an attempt has stopped logging steps; reports each stall once."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._attempt: object = None
        self._ended = self._reported = False

    def on_event(self, event: Mapping[str, Any], now: float) -> None:
        """Handle an event of the run's record."""
        match event.get("kind"):
            case "started":
                self._since, self._attempt, self._ended = None, event.get("attempt"), False
            case "failure" | "signal" | "finished" | "requeue":
                self._since, self._ended = None, True
            case "checkpoint" if self._since is not None:
                self._since = now

    def find_stall(self, now: float, logged_by: object) -> float | None:
        """Return the seconds since the last step if this is an unreported stall.

        Args:
            now: time on a monotonic clock, in seconds.
            logged_by: the attempt that has logged steps since the last call; None without steps.
        """
        is_ours = self._attempt is None or logged_by == self._attempt
        if logged_by is not None and is_ours and not self._ended:
            self._since, self._reported = now, False
        if self._since is None or self._reported or now - self._since < self._limit_s:
            return None
        self._reported = True
        return now - self._since
