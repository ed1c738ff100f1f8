"""Whether a run that is going fails to save, and since when: its training goes on, and would be lost."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime

from hpctrain.checkpoint.manifest import committed_steps
from hpctrain.jobs.tail import last_records
from hpctrain.rundir import RunDir


def why_not_saved(run: RunDir) -> str | None:
    """Since when there is no new checkpoint, and why; None where nothing is known to hinder it."""
    cause = _last_failure(run) or _full_disk(run)
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
    """Why the last save failed; None where it did not."""
    for event in last_records(run.events):
        match event.get("kind"):
            case "checkpoint" | "submitted":
                return None
            case "failure" if event.get("rank") is None:
                return str(event.get("cause"))
    return None


def _full_disk(run: RunDir) -> str | None:
    """A disk that is full takes no events, either."""
    try:
        disk = os.statvfs(run.path)
    except OSError as error:
        return f"{run.path}: {error.strerror}"
    return f"disk full at {run.path}" if disk.f_blocks and not disk.f_bavail else None
