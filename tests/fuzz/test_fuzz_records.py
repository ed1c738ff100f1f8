"""Fuzzing of the readers of a run folder, whose files may be truncated, or written by others."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.fuzzing import FOLDER, Parser, check_errors, check_time, encode, write_file
from helpers.run_files import EVENTS, FAILURE, METRICS, SPEC, to_jsonl

from hpctrain import files, messages, rundir
from hpctrain.checkpoint import interval
from hpctrain.checkpoint.format import manifest
from hpctrain.errors import CheckpointError, RendezvousError, UserError
from hpctrain.jobs.runs import error_report
from hpctrain.jobs.verify.training_record import TrainingRecord
from hpctrain.records import checkpoint_health, lease, log_tail, run_record, successor
from hpctrain.rundir import RunDir
from hpctrain.sandbox.layout import SandboxLayout
from hpctrain.supervisor import buffered_storage, node_check_step
from hpctrain.supervisor.failures import classify, failure_files
from hpctrain.supervisor.policy.history import History
from hpctrain.supervisor.workers import attempt_runner, worker_group
from hpctrain.sweeps import sweep_record
from hpctrain.sweeps.stopping_rules import TrialReport
from hpctrain.telemetry.accounting import timeline_events
from hpctrain.telemetry.accounting.time_breakdown import TimeBreakdown
from hpctrain.telemetry.loggers import dispatcher
from hpctrain.telemetry.loggers.dispatcher import GpuMetrics, LoggerState
from hpctrain.telemetry.report import (
    artifacts,
    attempts,
    device_metrics,
    metric_curves,
    run_data,
    run_results,
)
from hpctrain.telemetry.startup_parts import StartupDurations
from hpctrain.training.observe import loss_guard

RUN = RunDir(FOLDER / "run")
EVENT_LINES, METRIC_LINES = to_jsonl(EVENTS), to_jsonl(METRICS)
NODE_LINES = to_jsonl(
    [
        {
            "time": 1.0,
            "host": "n1",
            "cpus": 8,
            "memory_total": 100,
            "gpu_names": ["A"],
            "gpu_memory_total": [9],
        },
        {
            "time": 2.0,
            "seconds": 1.0,
            "host": "n1",
            "cpu": 5.0,
            "gpu_util": [99.0],
            "gpu_memory": [5],
            "gpu_clock_mhz": [1500],
            "gpu_throttled": [["power cap"]],
            "gpu_xids": [[79]],
            "gpu_ecc_errors": [0],
        },
    ]
)
RANK_FAILURE = {
    **FAILURE,
    "kind": "exception",
    "order": 1,
    "time": 1.0,
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


def of_events(function: Callable[[list[dict]], object]) -> Callable[[str], object]:
    return with_file(RUN.events, lambda: function(list(RUN.read_events())))


def of_metrics(function: Callable[[list[dict]], object]) -> Callable[[str], object]:
    return with_file(
        RUN.metrics, lambda: function(list(files.read_json_lines(RUN.metrics, rundir.is_metrics)))
    )


def read_failures() -> object:
    found = list(failure_files._read(RUN, 0))
    if found:
        first = failure_files.root_cause({failure.rank: failure for failure in found}.values())
        return str(first), classify.classify(first), classify.is_deterministic(first)
    return None


def read_claim() -> str:
    path = RUN.successor_claim("17")
    return successor.claim_successor(RUN, "18", path.name.rpartition("-")[2])


def read_gpu_metrics() -> object:
    metrics = GpuMetrics(RUN)
    metrics._offsets.clear()
    metrics.read()
    return metrics.values(2.0)


def sealed(text: str) -> bytes:
    """Return a manifest with this content and a valid checksum."""
    body = encode(text).removesuffix(b"\n}\n")
    return body + manifest._tail(body)


def read_node_check() -> object:
    launcher = SimpleNamespace(hosts=["n1"])
    spec = SimpleNamespace(processes_per_node=1)
    return node_check_step.NodeCheckRunner(RUN, spec, launcher)._read(0)


PARSERS = [
    Parser(
        sweep_record.read_sweep,
        [json.dumps(SWEEP)],
        (UserError,),
        with_file(RUN.sweep, lambda: sweep_record.read_sweep(RUN)),
    ),
    Parser(
        TrialReport.from_record,
        ['{"step": 3, "best": 0.5, "mean": null}'],
        (KeyError, TypeError, ValueError, OverflowError),
        lambda text: TrialReport.from_record(files.parse_json_line(text, FOLDER) or {}),
    ),
    Parser(
        run_results.read_results,
        [METRIC_LINES],
        call=with_file(RUN.metrics, lambda: run_results.read_results(RUN)),
    ),
    Parser(
        run_results.read_ranking,
        [json.dumps(SWEEP)],
        call=with_file(RUN.sweep, lambda: run_results.read_ranking(RUN.task(3))),
    ),
    Parser(files.parse_yaml, ["a: [1, 2]\nb: 2026-01-01\n"], (ValueError,), most_bytes=1 << 13),
    Parser(loss_guard.read_excluded_steps, [EVENT_LINES], call=of_events(loss_guard.read_excluded_steps)),
    Parser(
        messages._unpack,
        ['{"value": {"tuple": [{"dict": [["a", {"tensor": 0}]]}, {"dtype": "float32"}]}, "tensors": []}'],
        (RendezvousError, UserError),
        lambda text: messages._unpack(encode(text), [torch.zeros(1)], "a message"),
    ),
    Parser(
        files.read_json,
        [json.dumps(FAILURE)],
        (OSError, ValueError),
        lambda text: files.read_json(write_file(text)),
    ),
    Parser(files.read_json_lines, [EVENT_LINES], call=lambda text: files.read_json_lines(write_file(text))),
    Parser(
        files.parse_json_line, [json.dumps(FAILURE)], call=lambda text: files.parse_json_line(text, FOLDER)
    ),
    Parser(files.read_new_lines, [EVENT_LINES], call=lambda text: files.read_new_lines(write_file(text), 0)),
    Parser(
        artifacts.read_jsonl,
        [EVENT_LINES],
        call=lambda text: artifacts.read_jsonl(write_file(text), rundir.is_event),
    ),
    Parser(
        log_tail.read_last_records,
        [EVENT_LINES],
        call=lambda text: log_tail.read_last_records(write_file(text)),
    ),
    Parser(
        log_tail.read_last_lines, ["a\nb\n"], call=lambda text: log_tail.read_last_lines(write_file(text), 5)
    ),
    Parser(log_tail.FileTail.read, ["a\né\n"], call=lambda text: log_tail.FileTail(write_file(text)).read()),
    Parser(
        log_tail.RecordTail.read,
        [EVENT_LINES],
        call=lambda text: log_tail.RecordTail(write_file(text)).read(),
    ),
    Parser(
        log_tail.RecordTail.read_in_parts,
        [EVENT_LINES],
        call=lambda text: log_tail.RecordTail(write_file(text)).read_in_parts(),
    ),
    Parser(RunDir.read_events, [EVENT_LINES], call=with_file(RUN.events, lambda: list(RUN.read_events()))),
    Parser(
        buffered_storage.BufferedStorage.read,
        [EVENT_LINES],
        call=with_file(
            RUN.events,
            lambda: list(buffered_storage.BufferedStorage(RUN.path).read(RUN.events, rundir.is_event)),
        ),
    ),
    Parser(
        run_record.read_run_record,
        [EVENT_LINES],
        call=with_file(RUN.events, lambda: run_record.read_run_record(RUN).job),
    ),
    Parser(
        checkpoint_health.save_problem,
        [EVENT_LINES],
        call=with_file(RUN.events, lambda: checkpoint_health.save_problem(RUN)),
    ),
    Parser(
        lease.newest_lease,
        [lease.LeaseHolder("17", 0, "n1", 5).text().decode()],
        call=with_file(RUN.lease(0), lambda: lease.newest_lease(RUN)),
    ),
    Parser(successor.claim_successor, ["18"], (OSError,), with_file(RUN.successor_claim("17"), read_claim)),
    Parser(
        StartupDurations.from_event,
        [
            (
                '{"seconds": 3.0, "parts": {"launch": {"median": 1, "max": 2, "host": "n1"}}, '
                '"slowest_nodes": {"n1": {"launch": 2}}}'
            )
        ],
        call=lambda text: StartupDurations.from_event(files.parse_json_line(text, FOLDER) or {}),
    ),
    Parser(failure_files._read, [json.dumps(RANK_FAILURE)], call=with_file(RUN.failure(0, 0), read_failures)),
    Parser(
        error_report.details,
        [json.dumps(RANK_FAILURE)],
        call=with_file(RUN.failure(0, 0), lambda: list(error_report.details(RUN, EVENTS[5]))),
    ),
    Parser(History.from_events, [EVENT_LINES], call=of_events(History.from_events)),
    Parser(
        interval.InterruptionHistory.from_events,
        [EVENT_LINES],
        call=of_events(interval.InterruptionHistory.from_events),
    ),
    Parser(
        attempt_runner.required_lead_s,
        [EVENT_LINES],
        call=with_file(RUN.events, lambda: attempt_runner.required_lead_s(RUN, 60.0)),
    ),
    Parser(attempt_runner.longest_step_s, [METRIC_LINES], call=of_metrics(attempt_runner.longest_step_s)),
    Parser(
        worker_group._read_phase_durations,
        ['{"step": 1.5, "save": 3.0}'],
        call=with_file(RUN.phase_durations, lambda: worker_group._read_phase_durations(RUN)),
    ),
    Parser(
        classify.gpu_faults,
        [NODE_LINES],
        call=with_file(RUN.telemetry(0), lambda: classify.gpu_faults(RUN, ["n1"], 0.0)),
    ),
    Parser(
        node_check_step.NodeCheckRunner._read,
        ['{"trouble": ["disk"], "stopped": false}'],
        call=with_file(RUN.node_check_result(0, 0), read_node_check),
    ),
    Parser(
        timeline_events.read_timeline_events,
        [EVENT_LINES],
        call=of_events(lambda events: timeline_events.read_timeline_events(events, METRICS)),
    ),
    Parser(
        TimeBreakdown.from_records,
        [METRIC_LINES],
        call=of_metrics(lambda metrics: TimeBreakdown.from_records(EVENTS, metrics)),
    ),
    Parser(
        attempts.read_attempts,
        [EVENT_LINES],
        call=of_events(
            lambda events: attempts.read_attempts(
                events, TimeBreakdown.from_records(events, METRICS), {0: (3, 4)}
            )
        ),
    ),
    Parser(
        artifacts.read_checkpoints,
        [EVENT_LINES],
        call=of_events(lambda events: artifacts.read_checkpoints(RUN, events)),
    ),
    Parser(
        artifacts.read_environment,
        [to_jsonl([{"args": "--a b", "attempt": 0, "time": 1.0, "settings": {"seed": 1}}])],
        call=with_file(RUN.environment, lambda: artifacts.read_environment(RUN)),
    ),
    Parser(
        artifacts.read_codes,
        [json.dumps({"commit": "ab", "changed": True, "new_files": ["a"], "source": "/x"})],
        call=with_file(RUN.code / "submission-000.json", lambda: artifacts.read_codes(RUN)),
    ),
    Parser(
        artifacts.read_spec,
        [json.dumps(SPEC), "script: /x\nstarted: 2026-01-01\n"],
        call=lambda text: artifacts.read_spec(write_file(text)),
        most_bytes=1 << 14,
    ),
    Parser(
        metric_curves.MetricCurves.from_records,
        [METRIC_LINES],
        call=of_metrics(lambda lines: metric_curves.MetricCurves.from_records(lines).names),
    ),
    Parser(
        device_metrics.read_device_metrics,
        [NODE_LINES],
        call=lambda text: device_metrics.read_device_metrics([write_file(text)], 0.0, 10.0),
    ),
    Parser(
        run_data.RunData,
        [METRIC_LINES],
        call=with_file(RUN.metrics, lambda: run_data.RunData(RUN, run_data.RunContext(), now=time.time())),
    ),
    Parser(
        LoggerState.load,
        [json.dumps({"known": "a", "offset": 5, "attempt": 0, "steps": {"loss": 4}, "sending": None})],
        call=lambda text: LoggerState.load(write_file(text)),
    ),
    Parser(GpuMetrics.read, [NODE_LINES], call=with_file(RUN.telemetry(0), read_gpu_metrics)),
    Parser(dispatcher._lines, [METRIC_LINES], call=lambda text: dispatcher._lines(encode(text))),
    Parser(TrainingRecord, [METRIC_LINES], call=with_file(RUN.metrics, lambda: TrainingRecord(RUN))),
    Parser(
        manifest.Manifest.decode,
        [BODY.decode()],
        (CheckpointError,),
        lambda text: manifest.Manifest.decode(encode(text), FOLDER),
    ),
    Parser(
        manifest.Manifest.read,
        [BODY.decode()],
        (CheckpointError,),
        lambda text: manifest.Manifest.decode(sealed(text), FOLDER),
    ),
    Parser(
        SandboxLayout.load,
        [json.dumps({"shape": {"nodes": 2}, "port": 1, "block": 2})],
        call=with_file(FOLDER / "sandbox.json", lambda: SandboxLayout.load(FOLDER)),
    ),
]


@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_run_folder_readers_raise_only_documented_errors(parser):
    check_errors(parser)


@pytest.mark.parametrize("parser", PARSERS, ids=str)
def test_run_folder_readers_take_linear_time(parser):
    check_time(parser)
