"""Node sampling during a run, by a process that ends with it."""

import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.commands import run_command
from helpers.processes import assert_no_process_left, run_processes
from helpers.waiting import wait_for

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

pytestmark = pytest.mark.ranks

SCRIPT = """
import os, pathlib, signal, time
run = pathlib.Path(os.environ["HPCTRAIN_RUN_DIR"])
(run / f"rank-{os.environ['RANK']}").touch()
while not (run / "go-on").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "wait.py"
    path.write_text(SCRIPT)
    return path


def submit(script: Path, *options: str, env: dict[str, str] | None = None) -> RunDir:
    run = RunDir(script.parent / "run")
    shape = ["--nodes=2", "--ntasks-per-node=2", "--run-dir", str(run.path), "--max-failures=1"]
    run_command([sys.executable, "-m", "hpctrain", "submit", *shape, *options, str(script)], env)
    wait_for(lambda: len(list(run.path.glob("rank-*"))) == 4, 60, "the ranks")
    return run


def hpctrain(*args: str, env: dict[str, str] | None = None) -> int:
    return run_command([sys.executable, "-m", "hpctrain", *args], env, check=False, timeout=90).returncode


def samplers(run: RunDir) -> list[int]:
    module = "hpctrain.telemetry.sampling.sampler"
    return [
        process.pid
        for process in run_processes(run.path)
        if any(module in word for word in process.argv) and "hpctrain.runtime.worker" not in process.argv
    ]


def test_nodes_of_a_job_are_sampled_until_it_is_cancelled(slurm, script):
    run = submit(script, "--backend=slurm", env=slurm.env)
    wait_for(lambda: len(run.all_telemetry()) == 2, 30, "a file for each node")
    assert hpctrain("cancel", str(run.path), env=slurm.env) == 0
    hpctrain("wait", str(run.path), env=slurm.env)
    (begin, *_) = read_json_lines(run.telemetry(0))
    (started,) = [event for event in read_json_lines(run.events) if event["kind"] == "started"]
    assert begin["host"] == started["hosts"][0]
    assert_no_process_left(run.path)


@pytest.mark.extended
def test_sampler_dies_with_its_rank(script):
    run = submit(script, "--backend=local")
    wait_for(lambda: len(samplers(run)) == 2, 20, "what measures the nodes")
    for process in run_processes(run.path):
        if "hpctrain.runtime.worker" in process.argv and process.environ["SLURM_PROCID"] == "0":
            os.kill(process.pid, signal.SIGKILL)
    assert hpctrain("wait", str(run.path)) == 4
    assert_no_process_left(run.path)


def test_sampling_can_be_switched_off(script):
    run = submit(script, "--backend=local", "--env", "HPCTRAIN_TELEMETRY=0")
    assert samplers(run) == []
    (run.path / "go-on").touch()
    assert hpctrain("wait", str(run.path)) == 0
    assert run.all_telemetry() == []
