"""What lies in a run folder besides its time line: checkpoints, code, environment, and what was asked for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.rundir import RunDir, steps_in
from hpctrain.telemetry.report.curves import as_number
from hpctrain.telemetry.report.lines import read_lines, read_own

#: A diff that is longer is cut: a report is to be looked at.
_LONGEST_DIFF = 200_000


@dataclass
class Checkpoint:
    """A checkpoint that was written."""

    time: float
    attempt: int
    step: int | None
    num_bytes: int | None
    seconds: float | None
    stall_s: float | None
    tier: str | None
    kept: bool


@dataclass
class Code:
    """The code that a submission ran."""

    commit: str | None
    changed: bool
    new_files: list[str]
    source: str | None
    diff: str
    cut: bool
    """Whether the diff is longer than what is shown."""


def read_checkpoints(run: RunDir, events: Sequence[Mapping[str, Any]]) -> list[Checkpoint]:
    """Those that were written, by the events that tell of them."""
    kept = set(steps_in(run.checkpoints))
    found = []
    for event in events:
        if event.get("kind") == "checkpoint" and (time := as_number(event.get("time"))) is not None:
            step, size = event.get("step"), event.get("bytes")
            found.append(
                Checkpoint(
                    time=time,
                    attempt=event["attempt"] if isinstance(event.get("attempt"), int) else 0,
                    step=step if isinstance(step, int) else None,
                    num_bytes=size if isinstance(size, int) else None,
                    seconds=as_number(event.get("seconds")),
                    stall_s=as_number(event.get("stall_s")),
                    tier=str(event["tier"]) if "tier" in event else None,
                    kept=step in kept,
                )
            )
    return found


def read_environment(run: RunDir) -> dict[str, Any]:
    """The newest start's; the values of an older one where that says nothing."""
    environment: dict[str, Any] = {}
    for line in read_lines(run.environment):
        environment |= line
    return environment


def read_codes(run: RunDir) -> list[Code]:
    """The code of each submission, where it was copied."""
    codes = []
    for file in sorted(run.code.glob("submission-*.json")):
        try:
            record = json.loads(read_own(file).decode("utf-8", "replace"))
        except (OSError, ValueError):
            continue
        if not isinstance(record, dict):
            continue
        diff = ""
        with suppress(OSError):
            diff = read_own(file.with_suffix(".diff")).decode("utf-8", "replace")
        new = record.get("new_files")
        codes.append(
            Code(
                commit=str(record["commit"]) if record.get("commit") else None,
                changed=bool(record.get("changed")),
                new_files=[str(name) for name in new] if isinstance(new, list) else [],
                source=str(record["source"]) if record.get("source") else None,
                diff=diff[:_LONGEST_DIFF],
                cut=len(diff) > _LONGEST_DIFF,
            )
        )
    return codes


def read_spec(path: Path) -> dict[str, Any]:
    """What was asked for, as far as the file can be read."""
    import yaml

    try:
        values = yaml.safe_load(read_own(path).decode("utf-8", "replace"))
    except (OSError, yaml.YAMLError, ValueError, RecursionError):
        return {}
    return {str(name): value for name, value in values.items()} if isinstance(values, dict) else {}
