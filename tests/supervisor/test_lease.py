"""The lease on a run's folder: of several supervisors one holds it, and whoever is dead loses it."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from helpers.commands import environment
from helpers.waiting import wait_for

from hpctrain.records import lease as module
from hpctrain.records.lease import EXPIRY_S, Lease, LeaseHeld, newest_lease
from hpctrain.rundir import RunDir

_NO_SLURM = {"PATH": ""}


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def take(run):
    held = []

    def take(job_id, start=0, on_loss=lambda holder: None, **more):
        lease = Lease(run, job_id, start, _NO_SLURM, on_loss)
        lease.acquire(**more)
        held.append(lease)
        return lease

    yield take
    for lease in held:
        lease.release()


def grow_old(run):
    """As if the holder had been silent for longer than one that lives."""
    path = run.lease(run.leases()[-1])
    then = time.time() - EXPIRY_S - 1
    os.utime(path, (then, then))


def test_a_folder_has_one_holder(take):
    take("7")
    with pytest.raises(LeaseHeld, match="7"):
        take("8")


def test_two_supervisors_of_one_job_do_not_share_it(take):
    take("7")
    with pytest.raises(LeaseHeld, match="7"):
        take("7")


def test_what_was_given_back_is_free(take):
    take("7").release()
    take("8")


def test_who_is_silent_is_dead(take, run):
    take("7")
    grow_old(run)
    take("8")


@pytest.mark.parametrize(
    ("job_id", "more"),
    [("7", {"start": 1}), ("7", {"deaths": 1}), ("8", {"predecessor": "7"})],
    ids=["requeued", "supervisor killed", "successor"],
)
def test_whose_holder_must_have_ended_takes_it_at_once(take, job_id, more):
    take("7")
    take(job_id, **more)


def test_a_holder_that_was_taken_for_dead_is_told(take, run, monkeypatch):
    monkeypatch.setattr(module, "RENEW_INTERVAL_S", 0.05)
    lost = []
    take("7", on_loss=lost.append)
    take("7", start=1)
    wait_for(lambda: lost, 10, "the loss")
    assert (lost[0].job_id, lost[0].start) == ("7", 1)


def test_it_is_renewed_in_place(take, run, monkeypatch):
    monkeypatch.setattr(module, "RENEW_INTERVAL_S", 0.05)
    take("7")
    grow_old(run)
    wait_for(lambda: newest_lease(run).age_s < EXPIRY_S and newest_lease(run).holder.beat > 1, 10, "a beat")
    assert run.leases() == [0]
    assert [path.name for path in run.lease(0).parent.iterdir() if "now" not in path.name] == ["000000"]


def test_of_many_at_once_one_gets_it(run):
    code = (
        "import sys, time; from pathlib import Path; from hpctrain.rundir import RunDir\n"
        "from hpctrain.records.lease import Lease, LeaseHeld\n"
        "lease = Lease(RunDir(Path(sys.argv[1])), sys.argv[2], 0, {'PATH': ''}, print)\n"
        "while not Path(sys.argv[1], 'go').exists(): pass\n"
        "try: lease.acquire()\n"
        "except LeaseHeld: print('taken', flush=True)\n"
        "else: print('mine', flush=True); sys.stdin.read()\n"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(run.path), str(number)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(6)
    ]
    try:
        (run.path / "go").touch()
        said = sorted(process.stdout.readline().strip() for process in processes)
    finally:
        for process in processes:
            process.communicate(timeout=30)
    assert said == ["mine"] + ["taken"] * 5
