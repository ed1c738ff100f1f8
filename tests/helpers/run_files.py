"""Contents of the files of a run that failed."""

from __future__ import annotations

import json

EVENTS = [
    {"time": 1_764_000_000.0, "attempt": 0, "kind": "submitted", "job_id": "17", "backend": "local"},
    {"time": 1_764_000_001.0, "attempt": 0, "kind": "started", "nodes": 1, "world_size": 2, "hosts": ["n1"]},
    {"time": 1_764_000_002.0, "attempt": 0, "kind": "resumed", "step": 2, "broken": ["bad"], "seconds": 0.5},
    {"time": 1_764_000_004.0, "attempt": 0, "kind": "checkpoint", "step": 4, "path": "c", "tier": "local"},
    {"time": 1_764_000_005.0, "attempt": 0, "kind": "straggler", "rank": 1, "host": "n1", "ratio": 1.5},
    {
        "time": 1_764_000_006.0,
        "attempt": 0,
        "kind": "failure",
        "rank": 0,
        "host": "n1",
        "cause": "x",
        "log": "l",
    },
    {"time": 1_764_000_006.0, "attempt": 0, "kind": "excluded", "hosts": ["n1"], "reason": "x"},
    {
        "time": 1_764_000_007.0,
        "attempt": 0,
        "kind": "requeue",
        "seconds": 3.0,
        "by": "slurm",
        "class": "killed",
    },
    {"time": 1_764_000_008.0, "attempt": 0, "kind": "seen", "job_id": "17", "job_state": "FAILED"},
    {
        "time": 1_764_000_009.0,
        "attempt": 0,
        "kind": "finished",
        "state": "FAILED",
        "exit_code": 4,
        "cause": "x",
    },
]
METRICS = [
    {"step": 3, "loss": 0.5, "time": 1_764_000_003.0, "attempt": 0, "last_step": 9, "spent": {"all": 0.5}},
    {"step": 4, "loss": 0.4, "time": 1_764_000_004.0, "attempt": 0, "last_step": 9, "spent": {"data": 0.1}},
]
FAILURE = {"rank": 0, "host": "n1", "error": "E", "message": "m", "traceback": "t", "log": "l"}
SPEC = {
    "script": "/x/train.py",
    "workdir": "/x",
    "args": ["a"],
    "nodes": 1,
    "time_limit_s": 60,
    "env": {"A": "b"},
}


def to_jsonl(records: list[dict]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)
