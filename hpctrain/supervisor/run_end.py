"""Record the end of a run for the user."""

from __future__ import annotations

import logging
import math
from contextlib import suppress
from itertools import islice
from typing import Any, Literal

from hpctrain.errors import RunFailed
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.records.log_tail import read_last_records
from hpctrain.rundir import STOPPED_EARLY, RunDir, is_metrics
from hpctrain.supervisor.workers.attempt_runner import AttemptResult
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


def completion_note(run: RunDir, spec: JobSpec, result: AttemptResult | None) -> str | None:
    """Return a note if the ranks of a completed run trained alone, or its last loss is not finite."""
    records: list[dict[str, Any]] = []
    with suppress(OSError):  # An unreadable file is no reason to fail a completed run.
        records = list(islice(read_last_records(run.metrics, is_metrics), _RECORDS_SEARCHED))
    notes = []
    # Programs without optimizer steps of torch have other ways to meet, such as MPI. With agents, the ranks
    # use the store of an agent.
    met = result is None or result.world_size == 1 or result.has_process_group
    if records and not (met or spec.independent_ranks or spec.torchrun is not None):
        assert result is not None
        notes.append(
            f"No rank created a process group, so each of the {result.world_size} ranks ran alone. If the "
            "ranks are meant to train together, initialize torch.distributed in the script."
        )
    for record in records:
        with suppress(KeyError, TypeError, ValueError, OverflowError):
            loss = float(record["loss"])
            if not math.isfinite(loss):
                notes.append(f"The last loss is {format_number(loss)} (step {record.get('step')}).")
            break
    return " ".join(notes) or None
