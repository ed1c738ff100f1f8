"""COMPLETED means complete: a run whose training began but did not return is continued or has failed."""

from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.processes import assert_no_process_left
from helpers.training_runs import Run, preempt, submit_script

SCRIPT = SCRIPTS / "end_early.py"

pytestmark = pytest.mark.timeout(200)


def run_to_end(path: Path, mode: str, tasks: int = 1) -> Run:
    run = submit_script(path, SCRIPT, mode, options=["--backend=local", f"--ntasks-per-node={tasks}"])
    run.wait()
    assert_no_process_left(run.path)
    return run


def state_and_cause(run: Run) -> tuple[str, str | None]:
    (event,) = run.events("finished")
    return event["state"], event["cause"]


@pytest.mark.extended
def test_script_that_calls_os_exit_has_failed(tmp_path):
    run = run_to_end(tmp_path, "os._exit")
    state, cause = state_and_cause(run)
    assert state == "FAILED"
    assert "code 0 before Trainer.fit() finished (after step " in cause
    assert " of 10): To end training early" in cause
    assert [event["class"] for event in run.events("failure")] == ["unfinished"]
    assert run.events("restart") == []
    assert list((run.path / "unfinished").iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("mode", ["sys.exit", "os._exit of rank 1", "break"])
def test_script_that_ends_during_training_has_failed(tmp_path, mode):
    run = run_to_end(tmp_path, mode, tasks=2)
    state, cause = state_and_cause(run)
    assert state == "FAILED"
    assert "code 0 before " in cause
    assert {event["class"] for event in run.events("failure")} == {"unfinished"}
    assert ("rank 1 " in cause) or mode != "os._exit of rank 1"


@pytest.mark.long
def test_exception_caught_by_the_script_still_fails_the_run(tmp_path):
    run = run_to_end(tmp_path, "caught")
    state, cause = state_and_cause(run)
    assert state == "FAILED"
    assert "ValueError: bad data (the script caught this exception); " in cause
    assert [event["class"] for event in run.events("failure")] == ["python", "python"]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["end", "validate", "loop"])
def test_run_is_complete_when_training_returns_or_never_began(tmp_path, mode):
    run = run_to_end(tmp_path, mode)
    assert state_and_cause(run) == ("COMPLETED", None)
    if mode != "validate":
        # Nothing is left to train.
        run_to_end(tmp_path, mode)
        assert [event["state"] for event in run.events("finished")] == ["COMPLETED"] * 2


@pytest.mark.long
def test_script_that_swallows_a_slurm_preemption_is_continued(slurm, tmp_path):
    options = ["--nodes=2", "--ntasks-per-node=1", "--time=30"]
    run = submit_script(tmp_path, SCRIPT, "swallowed", options=options, env=slurm.env)
    run.wait_for_step(3)
    preempt(run.env)
    assert run.wait() == 0
    assert state_and_cause(run) == ("COMPLETED", None)
    assert run.events("signal")
    assert sorted(run.losses()) == list(range(1, 11))
