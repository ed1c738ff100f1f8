"""Read the files of a run folder for a report. Each may be missing, damaged, or written by others."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from hpctrain.files import IsValid, open_regular, parse_json_line, parse_yaml, read_json, read_regular
from hpctrain.rundir import RunDir, list_checkpoint_steps
from hpctrain.telemetry.report.metric_curves import as_number

#: Number of lines parsed together. A damaged line makes the batch slow, and batches use extra memory.
_LINES_AT_ONCE = 10_000
#: Longer diffs are truncated, to keep the report readable.
_MAX_DIFF = 200_000


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection: with millions of live values, it takes half of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_jsonl(path: Path, is_valid: IsValid | None = None) -> list[dict[str, Any]]:
    """Return the objects that `read_json_lines` yields, in half the time by parsing many lines together.

    An unreadable file yields no objects, so that a report does not depend on every file.
    """
    records: list[dict[str, Any]] = []
    with suppress(OSError), open_regular(path, follow_links=False) as file:
        while lines := list(islice(file, _LINES_AT_ONCE)):
            try:
                batch = json.loads(b"[" + b",".join(line for line in lines if line.strip()) + b"]")
            except (ValueError, RecursionError):
                batch = [parse_json_line(line.decode(errors="replace"), path) for line in lines]
            records += [
                record
                for record in batch
                if isinstance(record, dict) and (is_valid is None or is_valid(record))
            ]
    return records


@dataclass
class CheckpointRecord:
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
    commit: str | None
    changed: bool
    new_files: list[str]
    source: str | None
    diff: str


def read_checkpoints(run: RunDir, events: Sequence[Mapping[str, Any]]) -> list[CheckpointRecord]:
    kept_steps = set(list_checkpoint_steps(run.checkpoints))
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
                    kept=step in kept_steps,
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
        if len(diff) > _MAX_DIFF:
            diff = f"{diff[:_MAX_DIFF]}\n… truncated; the run folder contains the complete diff"
        new_files = record.get("new_files")
        codes.append(
            CodeVersion(
                commit=str(record["commit"]) if record.get("commit") else None,
                changed=bool(record.get("changed")),
                new_files=[str(name) for name in new_files] if isinstance(new_files, list) else [],
                source=str(record["source"]) if record.get("source") else None,
                diff=diff,
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
