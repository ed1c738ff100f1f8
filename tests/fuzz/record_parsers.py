"""Fuzzing of the readers of a run folder, whose files may be truncated, or written by others."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzzing import FOLDER, Parser, encode, write_file
from helpers.run_histories import EVENTS, FAILURE, METRICS, SPEC, to_jsonl

from hpctrain import files, record_types
from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.io import messages
from hpctrain.errors import CheckpointError, RendezvousError, UserError
from hpctrain.jobs.runs import error_report
from hpctrain.jobs.verify.training_record import TrainingRecord
from hpctrain.record_types import Event, StepRecord
from hpctrain.records import checkpoint_health, lease, log_tail, run_record, submit_successor
from hpctrain.rundir import RunDir
from hpctrain.sandbox.layout import SandboxLayout
from hpctrain.supervisor.failures import gpu_faults, root_cause
from hpctrain.supervisor.policy.history import History
from hpctrain.supervisor.workers import attempt_runner, node_steps, worker_group
from hpctrain.sweeps import sweep_record
from hpctrain.telemetry.loggers import dispatcher
from hpctrain.telemetry.loggers.dispatcher import GpuMetrics, load_state
from hpctrain.telemetry.report import device_metrics, run_data, run_results

RUN = RunDir(FOLDER / "run")
EVENT_LINES, METRIC_LINES = to_jsonl(EVENTS), to_jsonl(METRICS)
HARDWARE = {"cpus": 8, "memory_total": 100, "gpu_names": ["A"], "gpu_memory_total": [9]}
MEASURED = {"cpu": 5.0, "gpu_util": [99.0], "gpu_memory": [5], "gpu_clock_mhz": [1500], "gpu_ecc_errors": [0]}
MEASURED |= {"gpu_throttled": [["power cap"]], "gpu_xids": [[79]]}
NODE_LINES = to_jsonl(
    [{"time": 1.0, "host": "n1", **HARDWARE}, {"time": 2.0, "host": "n1", "seconds": 1.0, **MEASURED}]
)
RANK_FAILURE = {
    **FAILURE,
    "classes": ["ValueError", "Exception"],
    "corruption": {"suspects": [[0, "GPU-1"]], "verified_step": 3},
}
BODY = manifest.Manifest(4, 2, 1.0, 0.5, (manifest.make_entry("a", b"x"),)).encode()


SWEEP = {
    "space": {"lr": "0.1,0.2"},
    "folder": "/x",
    "args": ["a"],
    "trials": [{"lr": "0.1"}],
    "stopping": {"name": "median", "metric": "loss", "mode": "min", "min_steps": 5},
}


def with_file(path: Path, read: Callable[[], object]) -> Callable[[str], object]:
    """Return a call that writes the text as a file of the run before reading."""

    def call(text: str) -> object:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(text))
        try:
            return read()
        finally:
            path.unlink(missing_ok=True)

    return call


def of_path(function: Callable[..., object], example: str, call: Any = None, **more: Any) -> Parser:
    """A parser of a file; it gets the path."""
    read = call or function
    return Parser(function, [example], call=lambda text: read(write_file(text)), **more)


def of_run(function: Callable[..., object], path: Path, example: str, call: Any = None) -> Parser:
    """A parser of a file of the run."""
    return Parser(function, [example], call=with_file(path, call or (lambda: function(RUN))))


def read_failures() -> object:
    found = list(root_cause.read_failures(RUN, 0))
    if found:
        first = root_cause.root_cause({failure.rank: failure for failure in found}.values())
        return str(first), root_cause.classify(first), root_cause.is_deterministic(first)
    return None


def read_run_data() -> object:
    return run_data.RunData(RUN, now=time.time())


def read_gpu_metrics() -> object:
    metrics = GpuMetrics(RUN)
    metrics._offsets.clear()
    metrics.read()
    return metrics.values(2.0)


def sealed(text: str) -> bytes:
    """Return a manifest with this content and a valid checksum."""
    body = encode(text).removesuffix(b"\n}\n")
    return body + manifest._tail(body)


STARTUP = {
    **EVENTS[0],
    "kind": "startup",
    "seconds": 3.0,
    "parts": {"launch": {"median": 1, "max": 2, "host": "n1"}},
    "slowest_nodes": {"n1": {"launch": 2}},
}

#: The records in a run folder, with valid lines.
FORMATS = {
    Event: [*EVENT_LINES.splitlines(), json.dumps(STARTUP)],
    StepRecord: METRIC_LINES.splitlines(),
    record_types.NodeSample: NODE_LINES.splitlines(),
    record_types.FailureRecord: [json.dumps(RANK_FAILURE)],
    record_types.UnfinishedCall: ['{"what": "fit()", "last_step": 3}'],
    record_types.RankMessage: [
        '{"phase": "step", "step": 1, "beats": 2, "spent": [0, 1.5, 0], "timed": [1, 1]}'
    ],
    record_types.TrialLine: ['{"step": 3, "best": 0.5, "mean": null}'],
    record_types.LogLength: ['{"time": 1.5, "rank": 0, "bytes": 7}'],
    record_types.TrainedSamples: ['{"step": 1, "epoch": 0, "indices": [1, 2]}'],
}

PARSERS = [
    Parser(
        sweep_record.read_sweep,
        [json.dumps(SWEEP)],
        (UserError,),
        with_file(RUN.sweep, lambda: sweep_record.read_sweep(RUN)),
    ),
    of_run(run_results.read_results, RUN.metrics, METRIC_LINES),
    of_run(
        run_results.read_ranking, RUN.sweep, json.dumps(SWEEP), lambda: run_results.read_ranking(RUN.task(3))
    ),
    Parser(files.parse_yaml, ["a: [1, 2]\nb: 2026-01-01\n"], (ValueError,), most_bytes=1 << 13),
    Parser(
        messages._unpack,
        ['{"value": {"tuple": [{"dict": [["a", {"tensor": 0}]]}, {"dtype": "float32"}]}, "tensors": []}'],
        (RendezvousError, UserError),
        lambda text: messages._unpack(encode(text), [torch.zeros(1)], "a message"),
    ),
    of_path(files.read_json, json.dumps(FAILURE), errors=(OSError, ValueError)),
    *(
        Parser(
            record_types.decode,
            examples,
            (ValueError,),
            lambda text, kind=kind: record_types.decode(encode(text), kind),
        )
        for kind, examples in FORMATS.items()
    ),
    of_path(files.read_new_lines, EVENT_LINES, lambda path: files.read_new_lines(path, 0)),
    of_path(log_tail.read_last_records, EVENT_LINES, lambda path: log_tail.read_last_records(path, Event)),
    of_path(log_tail.read_last_lines, "a\nb\n", lambda path: log_tail.read_last_lines(path, 5)),
    of_path(log_tail.FileTail.read, "a\né\n", lambda path: log_tail.FileTail(path).read()),
    of_path(log_tail.RecordTail.read, EVENT_LINES, lambda path: log_tail.RecordTail(path, Event).read()),
    of_run(run_record.read_run_record, RUN.events, EVENT_LINES, lambda: run_record.read_run_record(RUN).job),
    of_run(checkpoint_health.save_problem, RUN.events, EVENT_LINES),
    of_run(
        lease.newest_lease,
        RUN.lease(0),
        lease.encode_holder(record_types.LeaseHolder("17", 0, "n1", 5)).decode(),
    ),
    Parser(
        submit_successor.claim_successor,
        ["18"],
        (OSError,),
        with_file(RUN.successor_claim("17"), lambda: submit_successor.claim_successor(RUN, "18", "17")),
    ),
    of_run(root_cause.read_failures, RUN.failure(0, 0), json.dumps(RANK_FAILURE), read_failures),
    of_run(
        error_report.details,
        RUN.failure(0, 0),
        json.dumps(RANK_FAILURE),
        lambda: list(error_report.details(RUN, record_types.to_record(EVENTS[5], Event))),
    ),
    of_run(History.from_events, RUN.events, EVENT_LINES, lambda: History.from_events(RUN.read_events())),
    of_run(
        attempt_runner.required_lead_s,
        RUN.events,
        EVENT_LINES,
        lambda: attempt_runner.required_lead_s(RUN, 60.0),
    ),
    of_run(worker_group._read_phase_durations, RUN.phase_durations, '{"step": 1.5, "save": 3.0}'),
    of_run(
        gpu_faults.gpu_faults, RUN.telemetry(0), NODE_LINES, lambda: gpu_faults.gpu_faults(RUN, ["n1"], 0.0)
    ),
    of_run(
        node_steps._read_node_check,
        RUN.node_check_result(0, 0),
        '{"trouble": ["disk"], "stopped": false}',
        lambda: node_steps._read_node_check(RUN, ["n1"], 1, 0),
    ),
    of_run(
        run_results.read_environment,
        RUN.environment,
        to_jsonl([{"args": "--a b", "attempt": 0, "time": 1.0, "settings": {"seed": 1}}]),
    ),
    of_run(
        run_results.read_codes,
        RUN.code / "submission-000.json",
        json.dumps({"commit": "ab", "changed": True, "new_files": ["a"], "source": "/x"}),
    ),
    Parser(
        run_results.read_spec,
        [json.dumps(SPEC), "script: /x\nstarted: 2026-01-01\n"],
        call=lambda text: run_results.read_spec(write_file(text)),
        most_bytes=1 << 14,
    ),
    of_path(
        device_metrics.read_device_metrics,
        NODE_LINES,
        lambda path: device_metrics.read_device_metrics([path], 0.0, 10.0),
    ),
    of_run(run_data.RunData, RUN.metrics, METRIC_LINES, read_run_data),
    of_run(run_data.RunData, RUN.events, EVENT_LINES, read_run_data),
    of_path(
        load_state,
        json.dumps({"known": "a", "offset": 5, "attempt": 0, "steps": {"loss": 4}, "sending": None}),
    ),
    of_run(GpuMetrics.read, RUN.telemetry(0), NODE_LINES, read_gpu_metrics),
    Parser(dispatcher._lines, [METRIC_LINES], call=lambda text: dispatcher._lines(encode(text))),
    of_run(TrainingRecord, RUN.metrics, METRIC_LINES),
    *(
        Parser(function, [BODY.decode()], (CheckpointError,), call)
        for function, call in (
            (manifest.Manifest.decode, lambda text: manifest.Manifest.decode(encode(text), FOLDER)),
            (manifest.Manifest.read, lambda text: manifest.Manifest.decode(sealed(text), FOLDER)),
        )
    ),
    Parser(
        SandboxLayout.load,
        [json.dumps({"shape": {"nodes": 2}, "port": 1, "block": 2})],
        call=with_file(FOLDER / "sandbox.json", lambda: SandboxLayout.load(FOLDER)),
    ),
]
