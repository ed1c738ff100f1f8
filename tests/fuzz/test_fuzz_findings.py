"""Texts that parsers once failed on."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from unittest.mock import patch

import click
import pytest
from helpers.fuzzing import FOLDER, encode, write_file

from hpctrain.checkpoint.format.manifest import Manifest, _tail
from hpctrain.cli.verify import _parse_steps
from hpctrain.cluster.amd_gpus import AmdGpu, _select
from hpctrain.cluster.device_plan import visible_devices
from hpctrain.cluster.env_variables import read_hosts
from hpctrain.cluster.ports import rendezvous_port
from hpctrain.errors import CorruptCheckpoint, EnvironmentMismatch, SchedulerError, SpecError, UserError
from hpctrain.jobs.backends.preflight_slurm import _when
from hpctrain.jobs.options.config_files import read_config_file
from hpctrain.jobs.options.spec_builder import _nodes, parse_gpus
from hpctrain.records.lease import LeaseHolder, newest_lease
from hpctrain.records.successor import claim_successor
from hpctrain.rundir import RunDir
from hpctrain.runtime.cpu_binding import _read_count
from hpctrain.runtime.supervisor_connection import Connection
from hpctrain.sandbox.layout import SandboxLayout
from hpctrain.slurm import command, job_requests
from hpctrain.slurm.command import is_answer_lost, list_rank_steps
from hpctrain.slurm.job_array import JobArray
from hpctrain.slurm.job_requests import submit_job
from hpctrain.slurm.node_queries import parse_nodes
from hpctrain.slurm.parsing import parse_number, parse_size_mib
from hpctrain.spec.load_spec import load_spec
from hpctrain.spec.restart_policy import parse_rule_changes
from hpctrain.supervisor.failures.classify import gpu_faults
from hpctrain.supervisor.failures.failure_files import _read
from hpctrain.supervisor.launch.srun import parse_task_report
from hpctrain.supervisor.workers.attempt_runner import longest_step_s
from hpctrain.supervisor.workers.worker_group import _read_phase_durations
from hpctrain.sweeps.search_space import parse_space
from hpctrain.sweeps.stopping_rules import StoppingRule
from hpctrain.telemetry.loggers.dispatcher import LoggerState, _lines
from hpctrain.telemetry.loggers.gpu_metrics import GpuMetrics
from hpctrain.telemetry.report.artifacts import read_spec
from hpctrain.telemetry.report.device_metrics import read_device_metrics
from hpctrain.telemetry.sampling.nvml import count_visible

#: int() rejects numbers with more than 4,300 digits.
LONG = "9" * 5000
#: json rejects such texts with a RecursionError.
NESTED = "[" * 100_000
RUN = RunDir(FOLDER / "findings")


def write(path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(text))


@pytest.mark.parametrize(
    ("parse", "expected"),
    [
        (lambda: parse_number(f"{LONG} sec"), None),
        (lambda: parse_size_mib(LONG), None),
        (lambda: parse_nodes(f"NodeName=n1 RealMemory={LONG}")[0].name, "n1"),
        (lambda: visible_devices({"CUDA_VISIBLE_DEVICES": LONG}), []),
        (lambda: count_visible(["GPU-0"], [LONG]), 0),
        (lambda: _select(LONG, [AmdGpu("0", "GPU-0")]), []),
        (lambda: _read_count({"OMP_NUM_THREADS": LONG}, "OMP_NUM_THREADS"), 0),
    ],
)
def test_number_with_thousands_of_digits_is_no_number(parse, expected):
    assert parse() == expected


@pytest.mark.parametrize(
    ("parse", "error"),
    [
        (lambda: JobArray.parse(LONG), SpecError),
        (lambda: JobArray.parse(f"0-3%{LONG}"), SpecError),
        (lambda: _nodes(f"1:{LONG}"), SpecError),
        (lambda: parse_gpus(f"a100:{LONG}"), SpecError),
        (lambda: parse_rule_changes({"oom.retries": LONG}), SpecError),
        (lambda: _parse_steps(f"1:{LONG}"), click.UsageError),
        (lambda: StoppingRule.parse(f"asha:{LONG}", "loss", "min", 1), UserError),
        (lambda: parse_space({"lr": f"log:1..{LONG}"}, FOLDER), UserError),
    ],
)
def test_option_with_thousands_of_digits_is_refused(parse, error):
    with pytest.raises(error):
        parse()


def test_range_with_thousands_of_digits_is_a_single_value():
    assert parse_space({"n": f"0:{LONG}"}, FOLDER) == {"n": [f"0:{LONG}"]}


def test_step_numbers_that_are_not_ascii_are_ignored():
    with patch.object(command, "run_slurm", return_value="17.² hpctrain-ranks-0\n17.1 hpctrain-ranks-0\n"):
        assert list_rank_steps(["17"], {}) == ["17.1"]


@pytest.mark.parametrize("answer", ["", "sbatch: lua: hello\n", ";north\n"])
def test_submission_without_a_job_id_is_an_unconfirmed_one(answer):
    with (
        patch.object(job_requests, "run_slurm", return_value=answer),
        pytest.raises(SchedulerError, match="printed no job id") as raised,
    ):
        submit_job([], {})
    assert is_answer_lost(str(raised.value))


@pytest.mark.parametrize("tasks", ["3-1", "1-", "-", "٣"])
def test_line_of_a_program_that_resembles_a_task_report_is_ignored(tasks):
    assert parse_task_report(f"srun: error: n1: tasks {tasks}: Killed") == []


def test_start_time_with_a_time_zone_is_formatted():
    assert _when("2026-11-22T10:00:00Z").isascii()


def test_identifier_with_invalid_bytes_has_a_port():
    assert rendezvous_port("mpich//home/\udcff") == rendezvous_port("mpich//home/\udcff")


def test_host_list_without_hosts_is_refused():
    with pytest.raises(EnvironmentMismatch, match="SLURM_STEP_NODELIST is ',', which contains no host"):
        read_hosts({"SLURM_STEP_NODELIST": ","}, "SLURM_STEP_NODELIST")


@pytest.mark.parametrize("content", [NESTED, '{"job_id": "17", "start": "0"}', '{"job_id": 17}', "null"])
def test_damaged_lease_has_an_unknown_holder(content):
    write(RUN.lease(0), content)
    state = newest_lease(RUN)
    assert state is not None
    assert state.holder == LeaseHolder("unknown (unreadable lease)")


def test_damaged_claim_belongs_to_another_job():
    write(RUN.successor_claim("17"), "1\udcff8")
    assert claim_successor(RUN, "18", "17") != "18"


@pytest.mark.parametrize(
    "damage",
    [
        {"rank": "0"},
        {"rank": [0]},
        {"message": None},
        {"order": "1"},
        {"time": {}},
        {"classes": [1]},
        {"corruption": {"suspects": [[math.inf, "x"]], "verified_step": 1}},
    ],
)
def test_damaged_failure_file_is_skipped(damage, caplog):
    whole = {"rank": 0, "host": "n1", "kind": "exit", "error": "e", "message": "m", "log": "l"}
    whole |= {"order": 1, "time": 1.0}
    write(RUN.failure(0, 0), json.dumps(whole))
    assert [failure.rank for failure in _read(RUN, 0)] == [0]
    write(RUN.failure(0, 0), json.dumps(whole | damage))
    assert list(_read(RUN, 0)) == []
    assert f"cannot read {RUN.failure(0, 0)}" in caplog.text


def test_metrics_without_a_time_have_no_duration():
    assert (
        longest_step_s([{"step": 1}, {"step": 2}, {"step": 3, "time": 3.0}, {"step": 4, "time": 9.0}]) == 6.0
    )


@pytest.mark.parametrize("line", [{"time": None}, {"time": "x"}, {"time": 5.0, "gpu_xids": LONG}])
def test_damaged_measurements_show_no_gpu_fault(line):
    write(RUN.telemetry(0), json.dumps({"host": "n1", **line}) + "\n")
    assert gpu_faults(RUN, ["n1"], 1.0) == {}


INVALID_YAML = ["a: 2001-99-99", "a: !!bool x", "a: !!timestamp x", "a: !!int ''", 'a: "\\UFFFFFFFF"', NESTED]


@pytest.mark.parametrize("content", INVALID_YAML)
def test_invalid_value_in_a_spec_is_refused(content):
    path = write_file(content)
    with pytest.raises(SpecError, match="is invalid"):
        load_spec(path)
    assert read_spec(path) == {}


@pytest.mark.parametrize("content", ['nodes: "\\UFFFFFFFF"', NESTED, "%YAML 1." + LONG, "module: &a [*a]"])
def test_invalid_configuration_file_is_refused(content):
    with pytest.raises(SpecError, match=r"is not valid YAML|nested too deeply"):
        read_config_file(write_file(content, "c.yaml"), {})


def test_damaged_state_of_a_logger_is_replaced():
    content = {"known": None, "offset": math.inf, "attempt": 0, "steps": {}, "sending": None}
    path = write_file(json.dumps(content))
    assert LoggerState.load(path) == LoggerState(path)


def test_damaged_lines_are_not_sent_to_loggers():
    assert list(_lines(f"{NESTED}\n".encode())) == []
    damaged = {"time": 10**400, "gpu_util": [1.0]}, {"time": 1.0, "gpu_util": [10**400]}
    metrics = GpuMetrics(RUN)
    write(RUN.telemetry(0), f"{NESTED}\n" + "".join(json.dumps(line) + "\n" for line in damaged))
    metrics._offsets.clear()
    metrics.read()
    assert metrics.values(1.0) == {}


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 10**300])
@pytest.mark.parametrize("name", ["gpu_util", "gpu_power_w", "cpu"])
def test_huge_measurements_fit_into_the_report(name, value):
    lines = [{"time": 1.0, "host": "n1", name: [value] if name.startswith("gpu") else value}] * 2
    lines.append({"time": 1.7e308, "host": "n1"})
    path = write_file("".join(json.dumps(line) + "\n" for line in lines))
    read_device_metrics([path], 0.0, 10.0)


def test_damaged_sandbox_has_no_layout():
    write(FOLDER / "sandbox.json", NESTED)
    assert SandboxLayout.load(FOLDER) is None


def test_damaged_phase_durations_are_ignored():
    write(RUN.phase_durations, json.dumps({"step": 10**400}))
    assert _read_phase_durations(RUN) == {}


def test_sealed_manifest_that_is_nested_too_deeply_is_corrupt():
    with pytest.raises(CorruptCheckpoint, match="RecursionError"):
        Manifest.decode(encode(NESTED) + _tail(encode(NESTED)), FOLDER)


@pytest.mark.parametrize("line", [NESTED, "[]", "1", "null"])
def test_message_that_is_no_object_is_refused(line):
    with pytest.raises(ValueError):
        Connection._open(SimpleNamespace(), line.encode())
