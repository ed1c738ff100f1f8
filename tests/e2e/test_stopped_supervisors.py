"""The supervisor or its guardian is stopped, then continued or killed. There is never a second supervisor."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from helpers.processes import assert_no_process_left, run_processes
from helpers.training_runs import Run, assert_undisturbed, submit
from helpers.waiting import wait_for

from hpctrain.cluster.processes import ProcessInfo

TWO = ["--nodes", "2", "--gpus-per-node", "1"]
LOCAL = ["--backend", "local", "--nodes", "2", "--gpus-per-node", "1"]
#: Longer than a supervisor that lives is ever silent to its ranks.
STOPPED_S = 15.0

pytestmark = [pytest.mark.long, pytest.mark.timeout(500)]


@pytest.fixture(scope="module")
def reference(slurm, tmp_path_factory) -> Run:
    run = submit(tmp_path_factory.mktemp("reference") / "run", slurm.env, TWO, step_s=0.0)
    assert run.wait() == 0
    return run


def supervisors(run: Run) -> list[ProcessInfo]:
    """The guardian, where there is one, and the supervisors after it."""
    found = [process for process in run_processes(run.path) if "hpctrain.supervisor" in process.argv]
    pids = {process.pid for process in found}
    return sorted(found, key=lambda process: process.parent in pids)


@contextmanager
def never_two(run: Run) -> Iterator[None]:
    """Fail if two supervisors of the run work at once inside the block."""
    over, most = threading.Event(), [0]

    def look() -> None:
        while not over.wait(0.1):
            found = supervisors(run)
            parents = {process.parent for process in found}
            most[0] = max(most[0], sum(process.pid not in parents for process in found))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert most[0] == 1


@pytest.fixture
def run(slurm, reference, tmp_path) -> Iterator[Run]:
    """A run that is training; it is bitwise the undisturbed one in the end."""
    run = submit(tmp_path / "run", slurm.env, TWO, step_s=0.2)
    run.wait_for_step(8)
    with never_two(run):
        yield run
        assert run.wait() == 0
    assert_undisturbed(run, reference)
    assert_no_process_left(run.path)
    assert [event["state"] for event in run.events("finished")] == ["COMPLETED"]


def send(run: Run, index: int, *numbers: signal.Signals) -> None:
    pid = supervisors(run)[index].pid
    for number in numbers:
        os.kill(pid, number)


def test_a_stopped_guardian_is_no_matter_until_the_end(run):
    guardian = supervisors(run)[0].pid
    os.kill(guardian, signal.SIGSTOP)
    try:
        wait_for(lambda: run.events("finished"), 120, "the end of the run")
        assert run.status()["state"] == "COMPLETED"
    finally:
        os.kill(guardian, signal.SIGCONT)


def test_a_supervisor_killed_below_a_stopped_guardian_is_replaced_once_it_is_continued(run):
    guardian, supervisor = (process.pid for process in supervisors(run))
    os.kill(guardian, signal.SIGSTOP)
    os.kill(supervisor, signal.SIGKILL)
    time.sleep(STOPPED_S)
    assert run.status()["state"] == "RUNNING"
    os.kill(guardian, signal.SIGCONT)
    wait_for(lambda: run.events("restart"), 60, "the next supervisor")
    assert [event["cause"] for event in run.events("failure")] == ["the supervisor was killed"]


def test_a_guardian_that_is_stopped_and_killed(run):
    send(run, 0, signal.SIGSTOP)
    time.sleep(2)
    send(run, 0, signal.SIGKILL)


def test_a_stopped_supervisor_is_continued(run):
    send(run, 1, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    assert run.status()["state"] == "RUNNING"
    send(run, 1, signal.SIGCONT)


def test_a_stopped_supervisor_is_killed(run):
    send(run, 1, signal.SIGSTOP)
    time.sleep(STOPPED_S)
    send(run, 1, signal.SIGKILL)
    wait_for(lambda: run.events("restart"), 60, "the next supervisor")


def test_the_guardian_of_a_stopped_supervisor_is_killed(run):
    send(run, 1, signal.SIGSTOP)
    time.sleep(1)
    send(run, 0, signal.SIGKILL)


@contextmanager
def stopped_local(tmp_path) -> Iterator[tuple[Run, int]]:
    run = submit(tmp_path / "run", {}, LOCAL, step_s=0.2)
    run.wait_for_step(8)
    (supervisor,) = supervisors(run)
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        yield run, supervisor.pid
    finally:
        if supervisor.pid in [process.pid for process in supervisors(run)]:
            os.kill(supervisor.pid, signal.SIGCONT)
        assert_no_process_left(run.path, 60)


def test_a_stopped_local_supervisor_keeps_the_folder(tmp_path):
    with stopped_local(tmp_path) as (run, pid):
        assert run.status()["state"] == "RUNNING"
        words = ["submit", *LOCAL, "--run-dir", str(run.path), __file__]
        refused = run.hpctrain(*words, check=False)
        assert refused.returncode == 2
        assert "still active" in refused.stderr
        assert run.hpctrain("cancel", str(run.path), check=False).returncode == 0
        os.kill(pid, signal.SIGCONT)
        wait_for(lambda: run.status()["state"] == "CANCELLED", 60, "the state CANCELLED")
        assert run.events("signal")[-1]["saved"] is True


def test_a_stopped_local_supervisor_that_is_killed_leaves_nothing(tmp_path):
    with stopped_local(tmp_path) as (run, pid):
        os.kill(pid, signal.SIGKILL)
        assert_no_process_left(run.path, 30)
        status = run.status()
        assert status["state"] == "FAILED"
        assert "exited without reporting a result" in status["cause"]
        submit(run.path, {}, LOCAL, step_s=0.0)
        assert run.wait() == 0
