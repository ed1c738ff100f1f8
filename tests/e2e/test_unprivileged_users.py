"""Runs of a user without privileges, on a cluster that enforces the limits of its QOS."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from helpers.accounting_slurm import AccountingSandbox
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.training_runs import LAST_STEP, check_preempted_run_continues, preempt
from helpers.unprivileged_user import UnprivilegedUser, UserRun
from helpers.waiting import wait_for

from hpctrain import sandbox
from hpctrain.errors import RunFailed

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.timeout(300)]

#: No limit, for each limit that a test sets.
UNLIMITED = ["MaxJobsPerUser=-1", "MaxSubmitJobsPerUser=-1", "MaxWall=-1", "GrpTRES=cpu=-1"]


@pytest.fixture(scope="module")
def user() -> Iterator[UnprivilegedUser]:
    with UnprivilegedUser() as user:
        yield user


@pytest.fixture(scope="module")
def site(user) -> Iterator[sandbox.Sandbox]:
    """A cluster on which the user has the QOS `small`."""
    name = f"users-{os.getpid()}"
    settings = [
        "AccountingStorageEnforce=associations,limits,qos",
        "PartitionName=cheap Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=0",
    ]
    try:
        box = sandbox.up(name, nodes=2, gpus_per_node=1, kind=AccountingSandbox, settings=settings)
        manage(box, "add", "qos", "small")
        manage(box, "add", "account", "lab")
        manage(box, "add", "user", user.name, "Account=lab", "QOS=normal,small")
        yield box
    finally:
        sandbox.down(name)


@pytest.fixture
def run(site, user, request) -> Iterator[UserRun]:
    """A run to submit; afterwards, all jobs are cancelled and no limits are set."""
    yield UserRun(request.node.name.translate(str.maketrans("[", "-", "]")), user, site.env)
    run_command(["scancel", f"--user={user.name}"], site.env)
    limit(site, *UNLIMITED)


def manage(box: sandbox.Sandbox, *words: str) -> None:
    run_command(["sacctmgr", "-i", *words], box.env)


def limit(box: sandbox.Sandbox, *limits: str) -> None:
    manage(box, "modify", "qos", "small", "set", *limits)


def test_preempted_run_of_a_user_continues(run, site, user):
    run.submit("--time=30")
    check_preempted_run_continues(run, site)
    run.hpctrain("report", str(run.path))
    assert {path.stat().st_uid for path in run.path.rglob("*")} == {user.uid}


def test_user_cancels_a_run(run):
    run.submit(step_s=0.5)
    run.wait_for_step(1)
    run.hpctrain("cancel", str(run.path))
    wait_for(lambda: run.status()["state"] == "CANCELLED", 60, "the state CANCELLED", 0.5)
    assert_no_process_left(run.path)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ("MaxJobsPerUser=1", "QOSMaxJobsPerUserLimit: together with your running jobs"),
        ("GrpTRES=cpu=1", "QOSGrpCpuLimit: together with the running jobs"),
        ("MaxWall=10", "QOSMaxWallDurationPerJobLimit: the job requests more time per job than the QOS"),
    ],
    ids=["jobs", "cpus", "time"],
)
def test_pending_run_names_the_limit(run, site, user, limits, reason):
    blocker = ["sbatch", "--parsable", "--qos=small", "--time=5", "--output=/dev/null", "--wrap=sleep 300"]
    job = user.run(blocker, site.env).stdout.strip()
    state = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    wait_for(lambda: run_command(state, site.env).stdout.strip() == "RUNNING", 20, "the other job")
    limit(site, limits)
    notes = run.submit("--qos=small", "--time=60").stderr
    assert ("QOS small allows at most 00:10:00 (MaxWall)" in notes) == limits.startswith("MaxWall")
    wait_for(lambda: reason in run.hpctrain("status", str(run.path)).stdout, 30, f"the reason {reason}", 0.5)
    run.hpctrain("cancel", str(run.path))


def test_refused_submission_names_the_limit(run, site):
    limit(site, "MaxSubmitJobsPerUser=2")
    for options in ([], ["--dry-run"]):
        refused = run.submit("--qos=small", "--array=0-3", *options, check=False)
        assert refused.returncode == 3
        assert "as many submitted jobs as the QOS allows (each array task counts as a job)" in refused.stderr
    assert not run.path.exists()


def test_run_whose_successor_is_refused_is_requeued(run, site):
    limit(site, "MaxSubmitJobsPerUser=1")
    run.submit("--qos=small", "--resume-mode=successor", step_s=0.2)
    run.wait_for_step(3)
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    assert (
        "submission of a successor job failed: sbatch failed: QOSMaxSubmit"
        in run.dir.supervisor_log.read_text()
    )
    assert (len(run.events("submitted")), len(run.events("resumed"))) == (1, 1)


def test_run_that_neither_successor_nor_requeue_can_continue_is_resumed(run, site):
    """Slurm cancels a preempted job of this partition at once, but the ranks save their state."""
    run.submit("--qos=small", "--partition=cheap", step_s=0.2)
    run.wait_for_step(3)
    limit(site, "MaxSubmitJobsPerUser=0")
    preempt(site.env, nodes=2, seconds=0)
    assert run.wait() == RunFailed.exit_code
    status = run.status()
    assert status["state"] == "FAILED"
    assert "QOSMaxSubmitJobPerUserLimit" in status["cause"]
    limit(site, *UNLIMITED)
    run.hpctrain("resume", str(run.path))
    assert run.wait() == 0
    assert run.events("resumed")[0]["step"] == run.events("signal")[0]["step"]
    assert sorted(run.losses()) == list(range(1, LAST_STEP + 1))
