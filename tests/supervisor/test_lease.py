"""The lease on a run folder: one supervisor holds it, and a dead one loses it."""

import os
import subprocess
import sys
import time
from contextlib import suppress

import pytest
from helpers.commands import environment
from helpers.disks import mounted_disk
from helpers.waiting import wait_for

from hpctrain.errors import SchedulerError
from hpctrain.records import lease as module
from hpctrain.records.lease import EXPIRY_S, Lease, LeaseHeld, newest_lease
from hpctrain.rundir import RunDir

_NO_SLURM = {"PATH": ""}


@pytest.fixture
def run(tmp_path) -> RunDir:
    return RunDir(tmp_path)


@pytest.fixture
def acquire(run):
    leases = []

    def acquire(job_id, start=0, on_loss=lambda holder: None, **kwargs):
        lease = Lease(run, job_id, start, _NO_SLURM, on_loss)
        lease.acquire(**kwargs)
        leases.append(lease)
        return lease

    yield acquire
    for lease in leases:
        lease.release()


def expire(run):
    """Set the lease's time back, as if its holder had been silent for too long."""
    path = run.lease(run.leases()[-1])
    past = time.time() - EXPIRY_S - 1
    os.utime(path, (past, past))


def test_folder_has_one_holder_until_it_releases_the_lease_or_is_silent(acquire, run):
    lease = acquire("7")
    for job_id in ("7", "8"):
        with pytest.raises(LeaseHeld, match="7"):
            acquire(job_id)
    lease.release()
    acquire("8")
    expire(run)
    acquire("9")


@pytest.mark.parametrize("full", ["size=256k", "size=1m,nr_inodes=16"], ids=["blocks", "inodes"])
def test_full_disk_does_not_hide_the_holder(tmp_path, full):
    """A job that cannot create a lease trains without one, but only if no other job holds it."""
    with mounted_disk(tmp_path / "run", full) as folder:
        run = RunDir(folder)
        first, second = (Lease(run, job_id, 0, _NO_SLURM, print) for job_id in ("7", "8"))
        first.acquire()
        with suppress(OSError):
            for number in range(100):
                (folder / str(number)).write_bytes(bytes(4096))
        with pytest.raises(LeaseHeld, match="7"):
            second.acquire()
        # Slurm does not respond, and without a newer lease, an expired holder that is alive does not exit.
        expire(run)
        with pytest.raises(LeaseHeld, match="7"):
            second.acquire()
        first.release()
        with pytest.raises(OSError, match="No space left"):
            second.acquire()


def test_holder_that_renews_during_a_query_keeps_the_lease(acquire, run, monkeypatch):
    """Slurm may take a minute to respond."""
    acquire("7")
    expire(run)

    def query_job(*_):
        os.utime(run.lease(0))
        raise SchedulerError("no answer")

    monkeypatch.setattr(module, "query_job", query_job)
    with pytest.raises(LeaseHeld, match="7"):
        acquire("8")


@pytest.mark.parametrize(
    ("job_id", "kwargs"),
    [("7", {"start": 1}), ("7", {"deaths": 1}), ("8", {"predecessor": "7"})],
    ids=["requeued", "supervisor killed", "successor"],
)
def test_lease_of_an_ended_holder_is_taken_at_once(acquire, job_id, kwargs):
    acquire("7")
    acquire(job_id, **kwargs)


def test_holder_that_lost_the_lease_is_notified(acquire, run, monkeypatch):
    monkeypatch.setattr(module, "RENEW_INTERVAL_S", 0.05)
    lost = []
    acquire("7", on_loss=lost.append)
    acquire("7", start=1)
    wait_for(lambda: lost, 10, "the loss")
    assert (lost[0].job_id, lost[0].start) == ("7", 1)


def test_lease_is_renewed_in_place(acquire, run, monkeypatch):
    monkeypatch.setattr(module, "RENEW_INTERVAL_S", 0.05)
    acquire("7")
    expire(run)
    wait_for(lambda: newest_lease(run).age_s < EXPIRY_S and newest_lease(run).holder.beat > 1, 10, "a beat")
    assert run.leases() == [0]
    assert [path.name for path in run.lease(0).parent.iterdir() if "now" not in path.name] == ["000000"]


def test_one_of_many_concurrent_holders_wins(run):
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
        outputs = sorted(process.stdout.readline().strip() for process in processes)
    finally:
        for process in processes:
            process.communicate(timeout=120)
    assert outputs == ["mine"] + ["taken"] * 5
