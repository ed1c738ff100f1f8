"""Contents of the files of a run that failed."""

from __future__ import annotations

import json
from typing import Any

from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.schema import Event, StepRecord, to_record

_EVENTS: list[tuple[float, str, dict]] = [
    (0.0, "submitted", {"job_id": "17", "backend": "local"}),
    (1.0, "started", {"nodes": 1, "world_size": 2, "hosts": ["n1"]}),
    (2.0, "resumed", {"step": 2, "broken": ["bad"], "seconds": 0.5}),
    (4.0, "checkpoint", {"step": 4, "path": "c", "tier": "local"}),
    (5.0, "straggler", {"rank": 1, "host": "n1", "ratio": 1.5}),
    (6.0, "failure", {"rank": 0, "host": "n1", "cause": "x", "log": "l"}),
    (6.0, "excluded", {"hosts": ["n1"], "reason": "x"}),
    (7.0, "requeue", {"seconds": 3.0, "by": "slurm", "class": "killed"}),
    (8.0, "seen", {"job_id": "17", "job_state": "FAILED"}),
    (9.0, "finished", {"state": "FAILED", "exit_code": 4, "cause": "x"}),
]
EVENTS = [
    {"time": 1_764_000_000.0 + seconds, "attempt": 0, "kind": kind, **fields}
    for seconds, kind, fields in _EVENTS
]
METRICS = [
    {"step": 3, "loss": 0.5, "time": 1_764_000_003.0, "attempt": 0, "last_step": 9, "spent": {"all": 0.5}},
    {"step": 4, "loss": 0.4, "time": 1_764_000_004.0, "attempt": 0, "last_step": 9, "spent": {"data": 0.1}},
]
FAILURE = {"rank": 0, "host": "n1", "kind": "exception", "error": "E", "message": "m", "traceback": "t"}
FAILURE |= {"log": "l", "order": 1, "time": 1.0}
SPEC = {
    "script": "/x/train.py",
    "workdir": "/x",
    "args": ["a"],
    "nodes": 1,
    "time_limit_s": 60,
    "env": {"A": "b"},
}


def event(kind: str, /, **fields: Any) -> Event:
    """Return an event, with defaults for the fields that every event of its kind has."""
    defaults = {"submitted": {"job_id": "1", "backend": "slurm"}}.get(kind, {})
    return to_record({"time": 1.0, "attempt": 0, "kind": kind, **defaults, **fields}, Event)


def step_record(step: int, **fields: Any) -> StepRecord:
    return to_record({"step": step, **fields}, StepRecord)


def to_jsonl(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def make_spec(run_dir: object = "/x", **fields: Any) -> JobSpec:
    facts = {"script": "/x.py", "name": "x", "run_id": "x", "run_dir": str(run_dir), "workdir": "/"}
    return JobSpec(**facts, **{"backend": "slurm", "python": "python", **fields})
