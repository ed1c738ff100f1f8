"""Tests that every benchmark runs. Measurements with these options have no meaning."""

import json
import math
import sys

import pytest
from helpers import REPOSITORY
from helpers.commands import run_command

BENCHMARKS = REPOSITORY / "benchmarks"

#: Options that make a benchmark short.
OPTIONS = {
    "buckets": "--rounds 1 --steps 2",
    "checkpoint": "--megabytes 4 --rounds 1 --ranks 2",
    "cli_startup": "--rounds 1",
    "compiled_restart": "--rounds 1",
    "data_fetch": "--batches 50 --rounds 1",
    "data_order": "--rounds 1",
    "detect": "--rounds 3",
    "elastic_determinism": "--rounds 1 --steps 3",
    "memory_copies": "--rounds 1 --kills 1 --ranks 2",
    "gpu": "--rounds 1 --only saves",
    "heartbeat": "--steps 2000 --rounds 1",
    "hostlist": "--rounds 1",
    "preemption": "--rounds 1",
    "rendezvous": "--hosts 100 --rounds 1",
    "report": "--steps 2000 --nodes 2 --rounds 1",
    "restart": "--rounds 1",
    "sampler": "--seconds 1",
    "slurm_rpcs": "--seconds 5",
    "stage": "--rounds 1 --module jinja2",
    "status": "--rounds 1",
    "step_hook": "--rounds 2",
    "step_overhead": "--rounds 1 --steps 40",
    "submit": "--rounds 1",
    "supervisor_cpu": "--seconds 2",
    "telemetry": "--pairs 1 --stretch 0.5 --steps-ms 1",
}
FAST = ("cli_startup", "data_fetch", "detect", "report")
NEEDS_SLURM = ("hostlist", "preemption", "slurm_rpcs", "status", "submit")


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in FAST else [pytest.mark.gpu if name == "gpu" else pytest.mark.long]


def test_every_benchmark_is_tested():
    modules = {path.stem for path in BENCHMARKS.glob("*.py")}
    assert modules - {"results", "run_all"} == OPTIONS.keys()


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks_of(name)) for name in sorted(OPTIONS)])
def test_benchmark_runs(name, tmp_path, request):
    if name in NEEDS_SLURM:
        request.getfixturevalue("slurm")  # skips the test if Slurm is missing
    output = tmp_path / "results.json"
    command = [sys.executable, BENCHMARKS / f"{name}.py", *OPTIONS[name].split()]
    # A busy machine must not fail the tests.
    env = {"CUDA_VISIBLE_DEVICES": "0"} if name == "gpu" else None  # tests hide GPUs from their processes
    run_command([*command, "--no-limits", "--json", output], env, timeout=150)
    results = json.loads(output.read_text())
    assert results
    assert all(math.isfinite(each["value"]) for each in results)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_fault_benchmark_runs(tmp_path, slurm):
    output = tmp_path / "scores.json"
    command = [sys.executable, BENCHMARKS / "faults/run.py", "--tools", "hpctrain", "--faults", "resize"]
    run_command([*command, "--json", output], timeout=290)
    scores = json.loads(output.read_text())["scores"]
    assert [(score["fault"], score["equal"], score["samples_lost"]) for score in scores] == [
        ("none", True, 0),
        ("resize", True, 0),
    ]
