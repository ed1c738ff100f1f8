"""Record the end of a run for the user."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from itertools import islice
from typing import Literal

from hpctrain.errors import RunFailed
from hpctrain.record_types import StepRecord
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import STOPPED_EARLY, RunDir
from hpctrain.text import format_number

log = logging.getLogger(__name__)

#: Number of metrics.jsonl records to search for a loss; validation records may have none.
_RECORDS_SEARCHED = 100


def finish_run(
    run: RunDir,
    state: Literal["COMPLETED", "CANCELLED", "FAILED"],
    cause: str | None = None,
    note: str | None = None,
) -> int:
    """Record the end of a run, with its cause, and return the exit code of its job."""
    final: str = state
    if state == "CANCELLED" and (reason := run.early_stop_reason()):
        final, note = STOPPED_EARLY, reason
    if state == "FAILED":
        cause = "; ".join(filter(None, [cause, run.storage.pending_reason])) or None
    exit_code = RunFailed.exit_code if state == "FAILED" else 0
    fields = {"note": note} if note else {}
    attempt = max(run.attempts(), default=0)
    run.log_event("finished", attempt, state=final, exit_code=exit_code, cause=cause, **fields)
    reasons = "; ".join(filter(None, [cause, note]))
    log.info("run %s%s", final, reasons and f": {reasons}")
    return exit_code


def completion_note(run: RunDir) -> str | None:
    """Return a note if the last loss is not finite."""
    # An unreadable file is no reason to fail a completed run.
    with suppress(OSError):
        for record in islice(read_last_records(run.metrics, StepRecord), _RECORDS_SEARCHED):
            with suppress(KeyError, TypeError, ValueError, OverflowError):
                loss = float(record.metrics["loss"])
                if math.isfinite(loss):
                    return None
                return f"The last loss is {format_number(loss)} (step {record.step})."
    return None
