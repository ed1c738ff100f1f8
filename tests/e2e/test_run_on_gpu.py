"""A run on a real GPU: faults do not change its result, and its report has the GPU's measurements."""

import json
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.processes import assert_no_process_left
from helpers.training_runs import Run
from helpers.waiting import wait_for

MAX_STEPS = 1000
OPTIONS = ["--backend=local", "--nodes=1", "--gpus-per-node=1", "--standby-workers=1"]
ARGUMENTS = [f"--max-steps={MAX_STEPS}", "--width=512", "--depth=8", "--precision=bf16-mixed"]

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def submit(path: Path) -> Run:
    run = Run(path, {"CUDA_VISIBLE_DEVICES": "0"})
    example = str(REPOSITORY / "examples" / "gpt.py")
    run.hpctrain("submit", *OPTIONS, f"--run-dir={path}", example, *ARGUMENTS, "--checkpoint-every=100")
    return run


@pytest.mark.timeout(300)
def test_preempted_and_killed_run_equals_the_undisturbed_one(tmp_path):
    undisturbed = submit(tmp_path / "undisturbed")
    assert undisturbed.wait() == 0
    run = submit(tmp_path / "run")
    run.wait_for_step(150)
    run.hpctrain("requeue", str(run.path))
    wait_for(lambda: len(run.events("resumed")) == 1, 60, "the first resumed attempt")
    run.wait_for_step(run.events("resumed")[0]["step"] + 150)
    run.kill_rank(0)
    assert run.wait() == 0
    assert len(run.events("resumed")) == 2, run.describe()
    assert run.losses() == undisturbed.losses()
    assert_no_process_left(run.path)
    check_report(json.loads(run.hpctrain("report", str(run.path), "--json").stdout))


def check_report(report: dict) -> None:
    (gpu,) = report["gpus"]
    assert report["energy"]["total_kwh"] > 0
    assert 0 < gpu["gpu_util"] <= 100
    assert gpu["gpu_memory"] > 0.25  # GiB
    # Measured on Hopper and newer GPUs.
    assert 0 < gpu["gpu_sm"] <= 100
    assert 0 < gpu["gpu_tensor"] <= 100
    assert 0 < gpu["gpu_dram"] <= 100
