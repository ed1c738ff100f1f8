"""Jobs that a real Slurm has lost, and a real Slurm that does not answer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
from helpers.accounting_slurm import AccountingSandbox
from helpers.batch_jobs import SlurmJobs
from helpers.commands import environment
from helpers.waiting import wait_for

from hpctrain import sandbox
from hpctrain.cluster.processes import processes
from hpctrain.jobs.runs.run import Run
from hpctrain.slurm.states import RunState

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module", params=["slurm", "accounting"])
def own_cluster(request: pytest.FixtureRequest) -> Iterator[SlurmJobs]:
    """A separate cluster, whose controller the tests may kill."""
    request.getfixturevalue(request.param)  # skips if unavailable
    name = f"lost-{os.getpid()}"
    try:
        kind = AccountingSandbox if request.param == "accounting" else sandbox.Sandbox
        box = sandbox.up(name, nodes=1, gpus_per_node=0, kind=kind)
        yield SlurmJobs(box, environment(box.env))
    finally:
        sandbox.down(name)


def lose_job_state(slurm: SlurmJobs) -> None:
    """Restart the controller without its job state."""
    box = slurm.box
    pid = box.daemons()["slurmctld"]
    next(process for process in processes() if process.pid == pid).kill()
    wait_for(lambda: box.daemons()["slurmctld"] is None, 5, "the end of slurmctld")
    for path in box.state.glob("job_state*"):
        path.unlink()
    box.start()


def silence(run: Run, seconds: float) -> None:
    """Set the time of the run's last write that many seconds back."""
    past = time.time() - seconds
    text = run.dir.events.read_text()
    stamp = text.partition('"time": ')[2].partition(",")[0]
    run.dir.events.write_text(text.replace(stamp, str(past)))
    for path in (run.dir.events, run.dir.path / "slurm.log"):
        os.utime(path, (past, past))


@pytest.mark.extended
def test_unresponsive_controller_leaves_runs_unknown(own_cluster, tmp_path):
    """Accounting still reports ends."""
    running = own_cluster.submit(tmp_path / "running", "sleep 60")
    ended = own_cluster.submit(tmp_path / "ended", "exit 3")
    wait_for(lambda: running.status().state is RunState.RUNNING, 20, "the job to start")
    wait_for(lambda: own_cluster.command("squeue", "-h", "-t", "failed") != "", 20, "the other to end")
    if isinstance(own_cluster.box, AccountingSandbox):
        record = ("sacct", "-nXP", "-o", "State", "-j", ended.job_id)
        wait_for(lambda: own_cluster.command(*record) == "FAILED", 20, "its end to be on record")
    squeue = tmp_path / "squeue"
    squeue.write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
    )
    squeue.chmod(0o755)
    environ = {**own_cluster.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    status = Run(running.dir, environ).status()
    assert (status.state, status.job_state) == (RunState.UNKNOWN, None)
    assert "Unable to contact slurm controller" in status.words
    expected = RunState.FAILED if isinstance(own_cluster.box, AccountingSandbox) else RunState.UNKNOWN
    status = Run(ended.dir, environ).status()
    assert status.state is expected, status.words
    assert running.status().state is RunState.RUNNING
    assert ended.status().state is RunState.FAILED
    running.cancel()


@pytest.mark.extended
def test_lost_job_is_neither_ended_at_once_nor_confused_with_another(own_cluster, tmp_path):
    """The state must never be that of the job that now has its number."""
    run = own_cluster.submit(tmp_path / "first", "echo here; sleep 60")
    log = tmp_path / "first" / "slurm.log"
    wait_for(lambda: log.exists() and "here" in log.read_text(), 20, "the job to start")
    assert run.status().state is RunState.RUNNING
    if isinstance(own_cluster.box, AccountingSandbox):
        record = ("sacct", "-nXP", "-o", "State", "-j", run.job_id)
        wait_for(lambda: own_cluster.command(*record) == "RUNNING", 20, "the job to be on record")
    lose_job_state(own_cluster)
    if isinstance(own_cluster.box, AccountingSandbox):
        # A controller that starts without its state reports this to accounting.
        wait_for(lambda: run.status().state.ended, 20, "the end on record")
        assert run.status().job_state in ("CANCELLED", "NODE_FAIL")
    else:
        status = run.status()
        assert status.state is RunState.UNKNOWN
        assert f"Slurm has no record of job {run.job_id}" in status.words

    # The controller counts from 1 again.
    for number in range(int(run.job_id)):
        other = own_cluster.submit(tmp_path / f"other-{number}", "sleep 60", "--hold")
    assert other.job_id == run.job_id
    assert other.status().state is RunState.PENDING
    assert run.status().state is not RunState.PENDING
    silence(run, 1000)
    assert run.status().state.ended
    run.cancel()
    assert other.status().state is RunState.PENDING
