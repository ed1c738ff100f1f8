"""Detect runs that train but do not save, which lose their progress."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from hpctrain.checkpoint.format.manifest import committed_steps
from hpctrain.checkpoint.listing import newest_script_checkpoint
from hpctrain.record_types import Event
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import RunDir


def save_problem(run: RunDir) -> str | None:
    """Return the reason why checkpoints are missing, and since when; None if no problem is known."""
    try:
        # A full disk cannot record events.
        cause = _last_failure(run) or full_disk(run)
    except OSError as error:
        cause = f"{run.path}: {error.strerror}"
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


def starts_over(run: RunDir, pattern: str | None = None) -> bool:
    """True if the next attempt of a started run has no checkpoint to resume from."""
    if run.function.exists() or next(committed_steps(run.checkpoints), None) is not None:
        return False
    if newest_script_checkpoint(run.checkpoints, pattern) is not None:
        return False
    is_started = False
    for event in run.read_events():
        is_started |= event.kind == "started"
        # A checkpoint may be in the local tier, in memory, or where only the script knows.
        if event.kind in ("checkpoint", "memory_copy") or event.is_loaded:
            return False
    return is_started


def record_script_checkpoint(run: RunDir, attempt: int, checkpoint: Path, time: float) -> None:
    """Record a checkpoint of the script at a time in seconds since the epoch, once in an attempt."""
    recorded = ("checkpoint", attempt, str(checkpoint))
    if all((event.kind, event.attempt, event.path) != recorded for event in run.read_events()):
        run.log_event("checkpoint", attempt, time=time, step=None, path=str(checkpoint))


def _last_failure(run: RunDir) -> str | None:
    """Return the cause of the last save failure; None if the last save succeeded."""
    for event in read_last_records(run.events, Event):
        match event.kind:
            case "checkpoint" | "submitted":
                return None
            case "failure" if event.rank is None:
                return str(event.cause)
    return None


def full_disk(run: RunDir) -> str | None:
    """Return a message if the run's disk is full, otherwise None."""
    disk = os.statvfs(run.path)
    return f"disk full at {run.path}" if disk.f_blocks and not disk.f_bavail else None
