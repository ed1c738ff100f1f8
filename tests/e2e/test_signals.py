"""Told to stop in any phase of a run, once or twice: it saves or leaves, and goes on as if nothing was."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from e2e_runs import Run
from helpers import assert_no_process_left, wait_for

SCRIPT = Path(__file__).with_name("phases.py")
SHAPE = ["--backend", "local", "--nodes", "2", "--tasks-per-node", "1"]


def submit(folder: Path, phase: str) -> Run:
    run = Run(folder / "run", {})
    run.hpctrain("submit", *SHAPE, "--run-dir", str(run.path), str(SCRIPT), phase, str(folder))
    return run


def preempt(run: Run) -> None:
    """Tell the local backend's job, as a preemption would tell one of Slurm's."""
    os.kill(int(run.events("submitted")[0]["job_id"]), signal.SIGUSR2)


def arrive(folder: Path, phase: str) -> None:
    wait_for(lambda: (folder / f"{phase}-0").exists(), 60, f"phase {phase}", interval=0.01)


@pytest.fixture(scope="module")
def losses(tmp_path_factory) -> dict[int, float]:
    run = submit(tmp_path_factory.mktemp("reference"), "none")
    assert run.wait() == 0
    return run.losses()


def assert_goes_on(run: Run, losses: dict[int, float]) -> None:
    assert run.wait() == 0
    assert run.losses() == losses
    assert len(run.events("requeue")) == 1
    assert_no_process_left(run.path)


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("start", marks=pytest.mark.long),
        "validation",
        pytest.param("save", marks=pytest.mark.long),
    ],
)
def test_told_to_stop_in_any_phase(losses, tmp_path, phase):
    run = submit(tmp_path, phase)
    arrive(tmp_path, phase)
    preempt(run)
    assert_goes_on(run, losses)
    assert run.events("failure") == []
    assert [stop["saved"] for stop in run.events("signal")] == ([] if phase == "start" else [True])


def test_told_a_second_time_while_it_saves(losses, tmp_path):
    run = submit(tmp_path, "save")
    wait_for(lambda: max(run.losses(), default=0) >= 1, 60, "the first step", interval=0.01)
    preempt(run)
    arrive(tmp_path, "save")
    preempt(run)
    assert_goes_on(run, losses)
    assert [stop["saved"] for stop in run.events("signal")] == [True]


@pytest.mark.long
def test_told_to_stop_while_the_ranks_are_started_again(losses, tmp_path):
    run = submit(tmp_path, "step")
    arrive(tmp_path, "step")
    run.kill_rank(1)
    wait_for(lambda: len(run.events("started")) == 2, 60, "the second start", interval=0.01)
    preempt(run)
    assert_goes_on(run, losses)
    assert len(run.events("failure")) == 1
