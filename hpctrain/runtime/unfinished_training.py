"""Record training calls that have not returned: a script that exits during such a call is not complete.

Each call has a file in the run folder while it is in progress. A process that exits with `os._exit` does not
remove the file, and the supervisor finds it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from hpctrain.errors import EXIT_CONTINUE
from hpctrain.files import make_folder, write_atomic
from hpctrain.records.crash_output import UNFINISHED, UNFINISHED_ADVICE, describe_unfinished
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, attempt_of
from hpctrain.runtime.failure_file import failure_record
from hpctrain.runtime.rank_activity import activity

#: Training calls of this process that have not returned, by folder, in order of start.
_unfinished: dict[str | None, TrainingMarker] = {}
_num_started = 0
#: Functions to call before the process exits with code 75: they wait for saves in the background.
pending_saves: list[Callable[[], None]] = []
_has_stopped = False


class TrainingMarker:
    """Marker of a training call, from its start to its return; a later call in the folder replaces it."""

    def __init__(self, call: str, folder: str | os.PathLike[str] | None, environ: Mapping[str, str]) -> None:
        self._call, self._environ = call, environ
        self._folder = None if folder is None else str(Path(folder).absolute())
        self._file: Path | None = None
        if RUN_DIR_VARIABLE in environ and ATTEMPT_VARIABLE in environ:
            key = hashlib.sha256(os.fsencode(self._folder or "")).hexdigest()[:8]
            run, attempt = attempt_of(environ)
            self._file = run.unfinished_marker(attempt, int(environ.get("RANK", "0")), key)
        self.step: int | None = None
        """Number of completed steps, set at the end."""
        self.last_step: int | None = None
        self._failure: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        global _num_started
        if _has_stopped and self._file is not None:
            raise SystemExit(EXIT_CONTINUE)
        _num_started += 1
        activity.is_managed = True
        _unfinished.pop(self._folder, None)
        _unfinished[self._folder] = self
        self._write()
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None:
            self.record_exception(error)
            return
        _unfinished.pop(self._folder, None)
        if self._file is not None:
            with suppress(OSError):
                self._file.unlink(missing_ok=True)

    def set_last_step(self, last_step: int | None) -> None:
        self.last_step = last_step
        self._write()

    def record_exception(self, error: BaseException) -> None:
        """Record that an exception ended training."""
        global _has_stopped
        if isinstance(error, SystemExit) and error.code == EXIT_CONTINUE:
            _has_stopped = True
        elif isinstance(error, Exception):
            self._failure = failure_record(error, self._environ)

    def failure(self) -> dict[str, Any]:
        problem = describe_unfinished(self._call, self.step, self.last_step)
        if self._failure is None:
            return {"kind": UNFINISHED, "error": problem, "message": UNFINISHED_ADVICE, "traceback": ""}
        message = f"{self._failure['message']} (the script caught this exception); {problem}"
        return {**self._failure, "message": message}

    def _write(self) -> None:
        if self._file is None:
            return
        with suppress(OSError):  # Without the file, such as on a full disk, only `os._exit` is undetected.
            make_folder(self._file.parent)
            record = {"what": self._call, "last_step": self.last_step}
            write_atomic(self._file, json.dumps(record) + "\n", durable=False)


def has_started() -> bool:
    return _num_started > 0


def has_stopped() -> bool:
    """True if training stopped in order to be continued, even if the script caught the exception."""
    return _has_stopped


def find_unfinished_training() -> dict[str, Any] | None:
    return next(reversed(_unfinished.values())).failure() if _unfinished else None
