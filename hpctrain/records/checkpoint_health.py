"""Detection of runs that train but fail to save, which would lose their progress."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime

from hpctrain.checkpoint.format.manifest import committed_steps
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir, is_event


def save_problem(run: RunDir) -> str | None:
    """Return the reason why checkpoints are missing, and since when; None if no problem is known."""
    cause = _last_failure(run) or _disk_trouble(run)
    if cause is None:
        return None
    newest = max(committed_steps(run.checkpoints), default=None)
    if newest is None:
        return f"no checkpoint yet: {cause}"
    since = ""
    with suppress(OSError):
        seconds = run.checkpoint(newest).stat().st_mtime
        since = f" ({datetime.fromtimestamp(seconds).isoformat(' ', 'seconds')})"
    return f"no checkpoint since step {newest}{since}: {cause}"


def _last_failure(run: RunDir) -> str | None:
    """Return the cause of the last save failure; None if the last save succeeded."""
    for event in read_last_records(run.events, is_event):
        match event.get("kind"):
            case "checkpoint" | "submitted":
                return None
            case "failure" if event.get("rank") is None:
                return str(event.get("cause"))
    return None


def _disk_trouble(run: RunDir) -> str | None:
    """Return a full or unreadable disk as the cause; a full disk cannot record events either."""
    try:
        return full_disk(run)
    except OSError as error:
        return f"{run.path}: {error.strerror}"


def full_disk(run: RunDir) -> str | None:
    """Return a message if the run's disk is full, otherwise None.

    Raises:
        OSError: the folder is not accessible.
    """
    disk = os.statvfs(run.path)
    return f"disk full at {run.path}" if disk.f_blocks and not disk.f_bavail else None
