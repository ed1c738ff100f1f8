"""Read the files of a run folder for a report. Each may be missing, damaged, or written by others."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.files import parse_yaml, read_regular
from hpctrain.rundir import RunDir, list_checkpoint_steps
from hpctrain.schema import CodeRecord, Event, Record, decode, read_records

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


def read_report_records(path: Path, kind: type[Record]) -> list[Record]:
    """Return the records of a file; an unreadable file has none, so that a report can do without it."""
    records: list[Record] = []
    with suppress(OSError):
        records.extend(read_records(path, kind, follow_links=False))
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


def read_checkpoints(run: RunDir, events: Sequence[Event]) -> list[CheckpointRecord]:
    kept_steps = set(list_checkpoint_steps(run.checkpoints))
    return [
        CheckpointRecord(
            time=event.time,
            attempt=event.attempt,
            step=event.step,
            num_bytes=event.num_bytes,
            seconds=event.duration_s,
            stall_s=event.stall_s,
            tier=event.tier,
            kept=event.step in kept_steps,
        )
        for event in events
        if event.kind == "checkpoint"
    ]


def count_saves(checkpoints: Sequence[CheckpointRecord]) -> int:
    """Return the number of saves; a checkpoint of the fast folder is also copied to the run folder."""
    return len({saved.time if saved.step is None else (saved.attempt, saved.step) for saved in checkpoints})


def read_environment(run: RunDir) -> dict[str, Any]:
    """Return the newest recorded value of each field of the environment, over all attempts."""
    environment: dict[str, Any] = {}
    for line in read_report_records(run.environment, dict):
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
            record = decode(read_regular(file, follow_links=False), CodeRecord)
        except (OSError, ValueError):
            continue
        diff = ""
        with suppress(OSError):
            diff = read_regular(file.with_suffix(".diff"), follow_links=False).decode("utf-8", "replace")
        if len(diff) > _MAX_DIFF:
            diff = f"{diff[:_MAX_DIFF]}\n… truncated; the run folder contains the complete diff"
        codes.append(CodeVersion(record.commit, record.changed, record.new_files, record.source, diff))
    return codes


def read_spec(path: Path) -> dict[str, Any]:
    """Return the specification; empty if the file cannot be read."""
    try:
        values = parse_yaml(read_regular(path, follow_links=False).decode("utf-8", "replace"))
    except (OSError, ValueError):
        return {}
    return {str(name): value for name, value in values.items()} if isinstance(values, dict) else {}
