"""Message of a rank that exits on a signal while it is not training."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hpctrain.checkpoint.script_checkpoints import newest_script_checkpoint
from hpctrain.rundir import ATTEMPT_VARIABLE, RUN_DIR_VARIABLE, RunDir
from hpctrain.runtime.unfinished_training import has_started
from hpctrain.text import format_duration


def exit_message(number: signal.Signals, environ: Mapping[str, str], step: int | None = None) -> str:
    """Return a message with the signal, its cause and the lost work, for the log of rank 0.

    Args:
        number: the signal.
        environ: variables of this process.
        step: the optimizer step of this attempt after which all ranks exit; None for an immediate exit.
    """
    exiting = "exiting" if step is None else f"all ranks exit after step {step} of this attempt"
    run = RunDir(Path(environ[RUN_DIR_VARIABLE])) if RUN_DIR_VARIABLE in environ else None
    try:
        cause = _cause(number, run, int(environ.get(ATTEMPT_VARIABLE, "0")))
        return f"received {number.name} ({cause}); {exiting}. {_lost(run)}"
    except OSError as error:
        return f"received {number.name}; {exiting}. The run folder cannot be read: {error}"


def _cause(number: signal.Signals, run: RunDir | None, attempt: int) -> str:
    if number == signal.SIGUSR2:
        return "the time limit is near"
    if run is not None and run.cancel_request.exists():
        return "cancellation"
    if run is not None and run.is_asked_to_requeue(attempt):
        return "requeue"
    return "preemption, requeue or cancellation"


def _lost(run: RunDir | None) -> str:
    if has_started():
        return (
            "No training is in progress. The checkpoints of completed training runs are intact. Work outside "
            "training is not saved."
        )
    if "hpctrain.training" in sys.modules:
        return "Training has not started; checkpoints of earlier attempts are intact."
    unused = "This script does not use hpctrain's Trainer, so hpctrain has not saved the state."
    if run is None:
        return unused
    if (found := newest_script_checkpoint(run.checkpoints)) is None:
        return (
            f"{unused} {run.checkpoints} contains no checkpoint written by the script, so work that the "
            "script has not saved elsewhere is lost."
        )
    path, saved = found
    age = format_duration(max(0.0, time.time() - saved))
    return f"{unused} The script's last checkpoint is {path} ({age} old). Work since then is lost."
