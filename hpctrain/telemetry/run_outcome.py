"""The outcome of an ended run, from which later runs of the same kind are predicted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.files import read_json
from hpctrain.rundir import RunDir
from hpctrain.text import is_finite

if TYPE_CHECKING:
    from hpctrain.telemetry.hparams import HparamValue

#: Maximum number of folders to search for outcomes.
_MAX_FOLDERS = 1000
#: Fields of a specification that runs of the same kind share.
_KIND = ("backend", "program", "script", "nodes", "ntasks_per_node", "gpus_per_node", "gpu_type")
#: Fields of an outcome that are numbers, and those that may be missing.
_NUMBERS = (
    *("submitted", "started", "ended", "nodes", "gpus", "failures", "stops"),
    *("train_s", "start_s", "close_s", "allocated_s"),
)
_OPTIONAL_NUMBERS = ("steps", "restart_s", "requeue_s", "save_every_s", "ettr", "kwh", "time_limit_s")


@dataclass(frozen=True)
class RunOutcome:
    """Times and interruptions of an ended run. Times are seconds, or seconds since the epoch."""

    run_id: str
    kind: list[Any]
    """Values of the fields `_KIND` of the specification."""
    hparams: dict[str, HparamValue]
    """The script's arguments."""
    state: str
    submitted: float
    started: float
    """Start of the first attempt."""
    ended: float
    nodes: int
    gpus: int
    """GPUs of all nodes; CPU ranks do not count."""
    steps: int | None
    """None if the script does not report its steps."""
    train_s: float
    """Time spent on steps that were not repeated, including validation and saves."""
    start_s: float
    """From the start of the first attempt to its first step."""
    close_s: float
    """From the last step to the end."""
    allocated_s: float
    """Total time in allocations."""
    failures: int
    """Interruptions that lost work."""
    stops: int
    """Interruptions after a save, such as preemptions."""
    restart_s: float | None
    """Mean time from a failure to the next step in the same allocation."""
    requeue_s: float | None
    """Mean time from an interruption to the next step in another allocation."""
    save_every_s: float | None
    """Mean training time between two saves."""
    ettr: float | None
    kwh: float | None = None
    """Measured energy."""
    partition: str = ""
    time_limit_s: float | None = None
    forecast: dict[str, Any] | None = None
    """The prediction at the submission."""

    @property
    def wait_s(self) -> float:
        return max(0.0, self.started - self.submitted)


def kind_of(spec: Mapping[str, Any]) -> list[Any]:
    """Return the values that runs of the same kind share."""
    return [spec.get(name) for name in _KIND]


def read_outcomes(runs_dir: Path, kind: list[Any] | None = None) -> list[RunOutcome]:
    """Return the outcomes of the runs in a folder, oldest first.

    Args:
        runs_dir: the folder of the runs.
        kind: return only runs of this kind (`kind_of`).
    """
    try:
        # Names end with the time of submission: prefer the newest.
        names = sorted(os.listdir(runs_dir), reverse=True)[:_MAX_FOLDERS]
    except OSError:
        return []
    known = {entry.name for entry in fields(RunOutcome)}
    found = []
    for name in names:
        with suppress(OSError, ValueError, TypeError):
            record = read_json(RunDir(runs_dir / name).outcome)
            if (kind is None or record.get("kind") == kind) and _is_valid(record):
                found.append(RunOutcome(**{key: its for key, its in record.items() if key in known}))
    return sorted(found, key=lambda one: one.ended)


def _is_valid(record: Mapping[str, Any]) -> bool:
    """True if the values of a record have the types that its readers require."""
    return (
        all(is_finite(record.get(name)) for name in _NUMBERS)
        and all(record.get(name) is None or is_finite(record[name]) for name in _OPTIONAL_NUMBERS)
        and isinstance(record.get("kind"), list)
        and isinstance(record.get("hparams"), dict)
    )
