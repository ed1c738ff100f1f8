"""Telling somebody that the run has ended, failed or stalled, beside all that the supervisor does."""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from hpctrain.errors import SpecError
from hpctrain.jobs.notify import Notify, is_address
from hpctrain.jobs.spec import JobSpec
from hpctrain.jobs.tail import RecordTail, last_records
from hpctrain.last_words import size_of
from hpctrain.rundir import RunDir

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
#: A target has so long, and an address that does not answer is asked so often.
_TARGET_LIMIT_S, _ANSWER_LIMIT_S, _TRIES, _PAUSE_S = 30.0, 8.0, 3, 2.0
#: What is on its way when the job ends is waited for, as long as the slowest target may take for one message.
_LAST_LIMIT_S = 35.0
_LONGEST_CAUSE = 500
_KILL_LIMIT_S = 3.0
#: Messages that wait for a target; further ones are dropped.
_MOST_WAITING = 50


@contextmanager
def notifying(run: RunDir, environ: Mapping[str, str]) -> Iterator[None]:
    """Tell whom the run's specification names of what happens inside of the block.

    Args:
        run: the folder of the run.
        environ: variables that commands get.
    """
    try:
        notify = JobSpec.load(run.spec).notify
    except SpecError:
        notify = Notify()  # What is wrong with it is said by whoever needs it.
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
    """Reads what the run writes down, and tells of it."""

    def __init__(self, run: RunDir, notify: Notify, environ: Mapping[str, str]) -> None:
        """Begin with what is written from now on."""
        self._run, self._notify = run, notify
        self._targets = [_Target(target, environ) for target in notify.targets]
        self._events, self._logged_bytes = RecordTail(run.events), size_of(run.metrics)
        self._said: str | None = None
        self._not_before = 0.0
        try:
            while self._events.read():
                pass
        except OSError:
            self._not_before = time.time()
        self.ended = threading.Event()
        self._stall = Stall(notify.stall_s)

    def run(self) -> None:
        """Tell, until the block has ended and all of it is told, or has taken too long."""
        while not self.ended.wait(_LOOK_EVERY_S):
            self._look_patiently()
        self._look_patiently()
        deadline = time.monotonic() + _LAST_LIMIT_S
        for target in self._targets:
            target.close()
        for target in self._targets:
            target.end(deadline)

    def _look_patiently(self) -> None:
        """Look; a file that cannot be read just now, as a disk may have it, is looked at the next time."""
        try:
            self._look()
        except OSError as error:
            if self._said != str(error):
                self._said = str(error)
                log.warning("what happens cannot be read, and nobody is told of it: %s", error)
        else:
            self._said = None

    def _look(self) -> None:
        size = size_of(self._run.metrics)
        logged_by = self._newest_attempt() if size != self._logged_bytes else None
        self._logged_bytes = size
        now = time.monotonic()
        for event in self._events.read():
            if event.get("time", 0.0) < self._not_before:
                continue
            self._stall.hear(event, now)
            if (occasion := occasion_of(event)) is not None:
                self._tell(occasion, event)
        if (seconds := self._stall.look(now, logged_by)) is not None:
            self._tell("stall", {"cause": f"no step was logged for {seconds:.0f} s"})

    def _newest_attempt(self) -> object:
        """The attempt that logged the last step."""
        return next(last_records(self._run.metrics), {}).get("attempt")

    def _tell(self, occasion: str, event: Mapping[str, Any]) -> None:
        if occasion in self._notify.on:
            message = message_of(self._run, occasion, event)
            for target in self._targets:
                target.tell(message)


class _Target:
    """An address or a line of shell, told in a thread of its own: one that hangs keeps no other waiting."""

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
            log.warning("a notification of %s was dropped: the target takes too long", message["occasion"])

    def close(self) -> None:
        """Nothing comes after what waits."""
        self._messages.put(None)

    def end(self, deadline: float) -> None:
        """Wait until all is told, or for `deadline`, by the clock that only goes forward."""
        self._thread.join(max(0.05, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("a notification did not arrive before the end: its target takes too long")
            if (process := self._running) is not None:
                _kill(process)
                self._thread.join(0.2)

    def _note(self, process: subprocess.Popen[bytes]) -> None:
        self._running = process

    def _work(self) -> None:
        while (message := self._messages.get()) is not None:
            try:
                if is_address(self._target):
                    post(self._target, message)
                else:
                    call(self._target, message, self._environ, self._note)
            except Exception as error:  # noqa: BLE001 (no target may end the supervisor)
                log.warning(
                    "a notification of %s did not arrive: %s: %s",
                    message["occasion"],
                    type(error).__name__,
                    error,
                )
            else:
                log.info("told of %s", message["occasion"])


class Stall:
    """Notices that an attempt which has logged steps logs none any more; tells of each stall once."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since: float | None = None
        self._attempt: object = None
        self._over = self._told = False

    def hear(self, event: Mapping[str, Any], now: float) -> None:
        """An event was written."""
        match event.get("kind"):
            case "started":
                self._since, self._attempt, self._over = None, event.get("attempt"), False
            case "failure" | "signal" | "finished" | "requeue":
                self._since, self._over = None, True
            case "checkpoint" if self._since is not None:
                self._since = now

    def look(self, now: float, logged_by: object) -> float | None:
        """Seconds since the last step, where that is a stall that was not told of.

        Args:
            now: seconds that only go forward.
            logged_by: the attempt that has logged steps since the last call; None where none has.
        """
        is_ours = self._attempt is None or logged_by == self._attempt
        if logged_by is not None and is_ours and not self._over:
            self._since, self._told = now, False
        if self._since is None or self._told or now - self._since < self._limit_s:
            return None
        self._told = True
        return now - self._since


def occasion_of(event: Mapping[str, Any]) -> str | None:
    """What an event is to somebody who is told of little."""
    match event.get("kind"):
        case "finished":
            return "finish"
        case "failure" if event.get("rank") is not None:
            return "stall" if event.get("class") == "hang" else "failure"
    return None


def message_of(run: RunDir, occasion: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """What is told; `text` is what chats show, which know it by that name or by `content`."""
    cause = str(event.get("cause") or "")[:_LONGEST_CAUSE]
    if occasion == "finish":
        words = f"Run {run.run_id} has ended: {event.get('state')}"
    else:
        words = f"Run {run.run_id} {'has stalled' if occasion == 'stall' else 'had a failure'}"
    text = f"{words}: {cause}" if cause else f"{words}."
    known = {name: event[name] for name in ("state", "attempt", "rank", "host", "log") if name in event}
    about = {"run_id": run.run_id, "folder": str(run.path), "time": event.get("time", time.time())}
    return {"occasion": occasion, "text": text, "content": text, "cause": cause, **about, **known}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """What is posted goes where it was to go, and nowhere else."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def post(address: str, message: Mapping[str, Any]) -> None:
    """POST a message as JSON.

    Raises:
        OSError: it was not taken.
    """
    opener = urllib.request.build_opener(_NoRedirects)
    data = json.dumps(message).encode()
    for left in reversed(range(_TRIES)):
        request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
        try:
            with opener.open(request, timeout=_ANSWER_LIMIT_S):
                return
        except OSError:
            if not left:
                raise
        time.sleep(_PAUSE_S)


def call(
    line: str,
    message: Mapping[str, Any],
    environ: Mapping[str, str],
    note: Callable[[subprocess.Popen[bytes]], None] | None = None,
) -> None:
    """Run a line of shell in the run folder, a message on its standard input, its main words in variables.

    `note` gets the process as soon as there is one.

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
            f"the command ended with {process.returncode}: {errors.decode(errors='replace')[-300:]}"
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
