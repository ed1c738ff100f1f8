"""Read the artifacts of a run folder: checkpoints, code, environment and specification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.files import parse_yaml, read_json, read_regular
from hpctrain.rundir import RunDir, list_checkpoint_steps
from hpctrain.telemetry.report.jsonl import read_jsonl
from hpctrain.telemetry.report.metric_curves import as_number

#: Longer diffs are truncated, to keep the report readable.
_MAX_DIFF = 200_000


@dataclass
class CheckpointRecord:
    """A written checkpoint."""

    time: float
    attempt: int
    step: int | None
    num_bytes: int | None
    seconds: float | None
    stall_s: float | None
    tier: str | None
    kept: bool


@dataclass
class CodeVersion:
    """The code of a submission."""

    commit: str | None
    changed: bool
    new_files: list[str]
    source: str | None
    diff: str
    cut: bool
    """True if the diff is truncated."""


def read_checkpoints(run: RunDir, events: Sequence[Mapping[str, Any]]) -> list[CheckpointRecord]:
    """Return the written checkpoints, according to the events."""
    kept = set(list_checkpoint_steps(run.checkpoints))
    checkpoints = []
    for event in events:
        if event.get("kind") == "checkpoint" and (time := as_number(event.get("time"))) is not None:
            step, size = event.get("step"), event.get("bytes")
            checkpoints.append(
                CheckpointRecord(
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
    return checkpoints


def count_saves(checkpoints: Sequence[CheckpointRecord]) -> int:
    """Return the number of saves; a checkpoint of the fast folder is also copied to the run folder."""
    return len({saved.time if saved.step is None else (saved.attempt, saved.step) for saved in checkpoints})


def read_environment(run: RunDir) -> dict[str, Any]:
    """Return the newest recorded value of each field of the environment, over all attempts."""
    environment: dict[str, Any] = {}
    for line in read_jsonl(run.environment):
        environment |= line
    # Checksums, for `hpctrain verify`.
    environment.pop("code", None)
    return environment


def read_codes(run: RunDir) -> list[CodeVersion]:
    """Return the code of each submission, if it was copied.

    Links are not followed: reports are shared, so they must not contain the target of a link in the run
    folder.
    """
    codes = []
    for file in sorted(run.code.glob("submission-*.json")):
        try:
            record = read_json(file, follow_links=False)
        except (OSError, ValueError):
            continue
        diff = ""
        with suppress(OSError):
            diff = read_regular(file.with_suffix(".diff"), follow_links=False).decode("utf-8", "replace")
        new = record.get("new_files")
        codes.append(
            CodeVersion(
                commit=str(record["commit"]) if record.get("commit") else None,
                changed=bool(record.get("changed")),
                new_files=[str(name) for name in new] if isinstance(new, list) else [],
                source=str(record["source"]) if record.get("source") else None,
                diff=diff[:_MAX_DIFF],
                cut=len(diff) > _MAX_DIFF,
            )
        )
    return codes


def read_spec(path: Path) -> dict[str, Any]:
    """Return the specification; empty if the file cannot be read."""
    try:
        values = parse_yaml(read_regular(path, follow_links=False).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return {}
    return {str(name): value for name, value in values.items()} if isinstance(values, dict) else {}
