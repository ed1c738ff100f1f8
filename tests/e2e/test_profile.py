"""Profiles of running programs, with and without the Trainer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.recorded_weights import end, reference_weights, submit, weights
from helpers.training_runs import Run


def profile(run: Run, *options: str, code: int = 0) -> tuple[str, str]:
    result = run.hpctrain("profile", str(run.path), *options, check=False)
    assert result.returncode == code, result.stdout + result.stderr + run.describe()
    return result.stdout, result.stderr


def trace_names(path: Path) -> list[str]:
    with gzip.open(path) as file:
        return [event.get("name") for event in json.load(file)["traceEvents"]]


@pytest.mark.extended
def test_profile_of_a_running_script_does_not_change_its_result(tmp_path):
    run = submit(tmp_path, "train.py", "profile")
    printed, messages = profile(run, "--ranks=0,1", "--steps=3", code=1)
    assert messages.startswith("Waiting for ")
    assert not run.dir.profile_request.exists()
    trace = run.dir.profile_trace(0, 0)
    assert trace_names(trace).count("aten::addmm") == 3
    assert f"trace  {trace}" in printed
    assert "Optimizer.step#Adam.step" in printed
    assert "rank 1: RuntimeError: the script is already using a PyTorch profiler" in messages
    # A run may also end during a profile.
    _, messages = profile(run, "--steps=100000", "--timeout=2", code=1)
    assert "after 2 s: waiting for rank 0 to complete 100" in messages
    _, messages = profile(run, "--ranks=1-2", code=2)
    assert "has no rank 2 (--ranks)" in messages
    end(run)
    assert weights(run, 0) == weights(run, 1) == reference_weights(len(weights(run, 0)))
    assert "own profile True" in run.dir.rank_log(0, 1).read_text()
    assert "the program ended after" in json.loads(run.dir.profile_result(1, 0).read_text())["error"]
    _, messages = profile(run, code=2)
    assert "is COMPLETED. Only a run that is RUNNING can be profiled" in messages


@pytest.mark.long
def test_profile_of_a_shell_script(tmp_path):
    run = submit(tmp_path, "--", "./train.sh")
    result, _ = json.loads(profile(run, "--ranks=0-1", "--steps=2", "--json")[0])["ranks"]
    assert result["last_step"] - result["first_step"] == 1
    assert trace_names(Path(result["trace"])).count("aten::addmm") == 2
    end(run)


@pytest.mark.long
def test_profile_of_ranks_on_two_slurm_nodes(slurm, tmp_path):
    run = submit(tmp_path, "--nodes=2", "train.py", backend="slurm", env=slurm.env)
    printed, _ = profile(run, "--ranks=1,3", "--steps=2")
    for rank in (1, 3):
        assert trace_names(run.dir.profile_trace(0, rank)).count("aten::addmm") == 2
        assert str(run.dir.profile_trace(0, rank)) in printed
    end(run)


@pytest.mark.long
def test_profile_of_a_trainer(tmp_path):
    run = submit(tmp_path, str(SCRIPTS / "train_slowly.py"), "0.05")
    assert "Optimizer.step" in profile(run)[0]
    assert len(trace_names(run.dir.profile_trace(0, 0))) > 100
    run.hpctrain("cancel", str(run.path))
    run.wait()
    assert run.events("failure") == []
