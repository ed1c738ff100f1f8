"""Records of runs: histories with known times, from which tests can compute sums, and a failed run."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.restart_policy import EndKind, RestartPolicy
from hpctrain.record_types import Event, StepRecord, to_record
from hpctrain.rundir import RunDir
from hpctrain.supervisor.policy.decide import CRASHES_PER_FAILURE

START = 1_764_000_000.0

#: The fields of a `straggler` event.
STRAGGLER = {
    "rank": 3,
    "host": "n7",
    "ratio": 1.43,
    "part": "compute",
    "lasting": True,
    "seconds": {"data": 0.001, "compute": 0.21, "exchange": 0.0},
    "typical": {"data": 0.001, "compute": 0.15, "exchange": 0.06},
}


class RunHistory:
    """The records of a run, second by second."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.metrics: list[StepRecord] = []
        self.now, self.attempt = START, -1

    def after(self, seconds: float, kind: str, /, **fields: Any) -> "RunHistory":
        """Add an event, that many seconds after the previous record."""
        self.now += seconds
        self.attempt += kind == "started"
        self.events.append(event(kind, **{"time": self.now, "attempt": max(0, self.attempt), **fields}))
        return self

    def steps(self, first: int, last: int, *, every: float, **fields: Any) -> "RunHistory":
        for step in range(first, last + 1):
            self.now += every
            record = {"loss": 1 / step, "epoch": 0, "time": self.now, "attempt": self.attempt, **fields}
            self.metrics.append(step_record(step, **record))
        return self


def started_run(seconds: float = 0.0) -> RunHistory:
    """Return a run that started after that many seconds in the queue."""
    return RunHistory().after(0, "submitted", job_id="7", backend="slurm").after(seconds, "started", nodes=2)


def disturbed_run(*, last_step: int = 300) -> RunHistory:
    """Return a completed run on two nodes with a crash, a preemption and a lost node."""
    hosts = {"nodes": 2, "world_size": 4, "hosts": ["n1", "n2"]}
    history = RunHistory().after(0, "submitted", job_id="7", backend="slurm").after(40, "started", **hosts)
    history.steps(1, 1, every=8, spent={"all": 2.0, "data": 0.25}).steps(
        2, 100, every=0.5, spent={"data": 0.1}
    )
    history.after(1, "checkpoint", step=100, seconds=1.0, stall_s=0.2, bytes=12_000_000, tier="shared")
    history.steps(101, 120, every=0.5)
    history.after(0.4, "failure", rank=3, host="n2", cause="rank 3 on n2: SIGKILL", log="/r/logs/a.log")
    history.after(0.1, "restart", cause="rank 3 on n2: SIGKILL").after(0.5, "started", **hosts)
    history.after(6, "resumed", step=100, seconds=1.5).steps(101, 200, every=0.5)
    history.after(2, "signal", signal="SIGTERM", step=200, saved=True).after(1, "requeue", by="requeue")
    history.after(120, "started", **hosts).after(6, "resumed", step=200, seconds=1.5)
    history.steps(201, 220, every=0.5).after(90, "started", nodes=2, world_size=4, hosts=["n1", "n3"])
    history.after(6, "resumed", step=200, seconds=1.5).steps(201, last_step, every=0.5, val_accuracy=0.5)
    return history.after(1, "finished", state="COMPLETED", exit_code=0, cause=None)


def write_run(folder: Path, history: RunHistory, **spec: Any) -> RunDir:
    run = RunDir(folder)
    run.telemetry(0).parent.mkdir(parents=True, exist_ok=True)
    run.events.write_text(to_jsonl([record.fields() for record in history.events]))
    run.metrics.write_text(to_jsonl([record.line() for record in history.metrics]))
    if spec:
        run.spec.write_text(json.dumps(spec))  # which is YAML
    return run


# The files of a run that failed.
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


def most_attempts(policy: RestartPolicy, ends: Iterable[EndKind], *, writes_files: bool) -> int:
    """Return the maximum number of attempts without known progress that end in these ways."""
    kinds = {*ends}
    sharing = {kind for kind in kinds if policy[kind].retries is None}
    most = policy.max_failures * bool(sharing)
    most += sum((policy[kind].retries or 0) + 1 for kind in kinds - sharing)
    return most * CRASHES_PER_FAILURE if writes_files else most
