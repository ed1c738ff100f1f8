"""The supervisor or its watchdog is stopped, then continued or killed. There is never a second supervisor."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from helpers.processes import assert_no_process_left
from helpers.training_runs import Run, assert_undisturbed, submit
from helpers.waiting import wait_for

TWO = ["--nodes", "2", "--gpus-per-node", "1"]
LOCAL = ["--backend", "local", "--nodes", "2", "--gpus-per-node", "1"]
#: Longer than a live supervisor ever leaves its ranks without a message.
STOPPED_S = 15.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]


@contextmanager
def assert_single_supervisor(run: Run) -> Iterator[None]:
    """Fail if two supervisors of the run are active at once inside the block."""
    finished, max_supervisors = threading.Event(), [0]

    def sample() -> None:
        while not finished.wait(0.1):
            matching = run.supervisors()
            parents = {process.parent for process in matching}
            max_supervisors[0] = max(
                max_supervisors[0], sum(process.pid not in parents for process in matching)
            )

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()
    assert max_supervisors[0] == 1


@pytest.fixture
def run(slurm, reference, tmp_path) -> Iterator[Run]:
    """A run that is training; its result must be bitwise the undisturbed one."""
    run = submit(tmp_path / "run", slurm.env, TWO, step_s=0.2)
    run.wait_for_step(8)
    with assert_single_supervisor(run):
        yield run
        assert run.wait() == 0
    assert_undisturbed(run, reference(2))
    assert [event["state"] for event in run.events("finished")] == ["COMPLETED"]


def test_supervisor_killed_under_a_stopped_watchdog_is_replaced_later(run):
    watchdog, supervisor = (process.pid for process in run.supervisors())
    os.kill(watchdog, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    time.sleep(STOPPED_S)
    assert run.status()["state"] == "RUNNING"
    os.kill(watchdog, signal.SIGCONT)
    wait_for(lambda: run.events("restart"), 60, "the next supervisor")
    assert [event["cause"] for event in run.events("failure")] == ["the supervisor was killed"]


def test_stopped_local_supervisor_keeps_the_run_folder(tmp_path):
    run = submit(tmp_path / "run", {}, LOCAL, step_s=5.0)
    run.wait_for_step(1)
    (supervisor,) = run.supervisors()
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        assert run.status()["state"] == "RUNNING"
        refused = run.hpctrain("submit", *LOCAL, "--run-dir", str(run.path), __file__, check=False)
        assert refused.returncode == 2
        assert "still active" in refused.stderr
        assert run.hpctrain("cancel", str(run.path), check=False).returncode == 0
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    run.wait_for_state("CANCELLED")
    assert run.events("signal")[-1]["saved"] is True
    assert_no_process_left(run.path, 60)
