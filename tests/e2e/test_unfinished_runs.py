"""COMPLETED means complete: a run whose training began but did not return is continued or has failed."""

import pytest
from helpers import SCRIPTS
from helpers.processes import assert_no_process_left
from helpers.training_runs import Run, preempt, submit_script

SCRIPT = SCRIPTS / "end_early.py"

pytestmark = pytest.mark.timeout(200)


def state_and_cause(run: Run) -> tuple[str, str | None]:
    (event,) = run.events("finished")
    return event["state"], event["cause"]


@pytest.mark.extended
def test_script_that_calls_os_exit_has_failed(tmp_path):
    run = submit_script(tmp_path, SCRIPT, "os._exit")
    run.wait()
    assert_no_process_left(run.path)
    state, cause = state_and_cause(run)
    assert state == "FAILED"
    assert "code 0 before Trainer.fit() finished (after step " in cause
    assert " of 10): To end training early" in cause
    assert [event["class"] for event in run.events("failure")] == ["unfinished"]
    assert run.events("restart") == []
    assert list((run.path / "unfinished").iterdir()) == []


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
