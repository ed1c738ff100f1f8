"""Runs of a user without privileges, on a cluster that enforces the limits of its QOS."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.accounting_slurm import AccountingSandbox
from helpers.commands import run_command
from helpers.slurm_versions import new_cluster
from helpers.training_runs import LAST_STEP, Run, check_preempted_run_continues, preempt, submit
from helpers.unprivileged_user import UnprivilegedUser
from helpers.waiting import wait_for

from hpctrain.errors import RunFailed
from hpctrain.sandbox import Sandbox

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.timeout(300)]

#: No limit, for each limit that a test sets.
UNLIMITED = ["MaxJobsPerUser=-1", "MaxSubmitJobsPerUser=-1", "MaxWall=-1", "GrpTRES=cpu=-1"]


@pytest.fixture(scope="module")
def user() -> Iterator[UnprivilegedUser]:
    with UnprivilegedUser() as user:
        yield user


@pytest.fixture(scope="module")
def site(user) -> Iterator[Sandbox]:
    """A cluster on which the user has the QOS `small`."""
    settings = [
        "AccountingStorageEnforce=associations,limits,qos",
        "PartitionName=cheap Nodes=ALL PriorityTier=1 PreemptMode=CANCEL GraceTime=0",
    ]
    with new_cluster("users", nodes=2, gpus_per_node=1, kind=AccountingSandbox, settings=settings) as box:
        manage(box, "add", "qos", "small")
        manage(box, "add", "account", "lab")
        manage(box, "add", "user", user.name, "Account=lab", "QOS=normal,small")
        yield box


SHAPE = ["--nodes=1", "--gpus-per-node=1"]


@pytest.fixture
def submit_as_user(site, user) -> Iterator[Callable[..., Run]]:
    """Return a function that submits a run; afterwards, all jobs are cancelled and no limits are set."""
    folder = Path(tempfile.mkdtemp(dir=user.home))
    shutil.chown(folder, user.name)
    yield lambda *options, step_s=0.1: submit(
        folder / "run", site.env, SHAPE, options=options, step_s=step_s, call=user.call_hpctrain
    )
    run_command(["scancel", f"--user={user.name}"], site.env)
    limit(site, *UNLIMITED)


def manage(box: Sandbox, *words: str) -> None:
    run_command(["sacctmgr", "-i", *words], box.env)


def limit(box: Sandbox, *limits: str) -> None:
    manage(box, "modify", "qos", "small", "set", *limits)


def test_preempted_run_of_a_user_continues(submit_as_user, site, user):
    run = submit_as_user("--time=30")
    check_preempted_run_continues(run, site)
    run.hpctrain("report", str(run.path))
    assert {path.stat().st_uid for path in run.path.rglob("*")} == {user.uid}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ("MaxJobsPerUser=1", "QOSMaxJobsPerUserLimit: together with your running jobs"),
        ("GrpTRES=cpu=1", "QOSGrpCpuLimit: together with the running jobs"),
        ("MaxWall=10", "QOSMaxWallDurationPerJobLimit: the job requests more time per job than the QOS"),
    ],
    ids=["jobs", "cpus", "time"],
)
def test_pending_run_names_the_limit(submit_as_user, site, user, limits, reason):
    blocker = ["sbatch", "--parsable", "--qos=small", "--time=5", "--output=/dev/null", "--wrap=sleep 300"]
    job = user.run(blocker, site.env).stdout.strip()
    state = ["squeue", "--noheader", f"--jobs={job}", "--format=%T"]
    wait_for(lambda: run_command(state, site.env).stdout.strip() == "RUNNING", 20, "the other job")
    limit(site, limits)
    run = submit_as_user("--qos=small", "--time=60")
    wait_for(lambda: reason in run.hpctrain("status", str(run.path)).stdout, 30, f"the reason {reason}", 0.5)
    run.hpctrain("cancel", str(run.path))


def test_refused_submission_names_the_limit(submit_as_user, site):
    limit(site, "MaxSubmitJobsPerUser=2")
    message = r"as many submitted jobs as the QOS allows \(each array task counts as a job\)"
    with pytest.raises(AssertionError, match=message):
        submit_as_user("--qos=small", "--array=0-3")


def test_run_whose_successor_is_refused_is_requeued(submit_as_user, site):
    limit(site, "MaxSubmitJobsPerUser=1")
    run = submit_as_user("--qos=small", "--resume-mode=successor", step_s=0.2)
    run.wait_for_step(3)
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    message = "submission of a successor job failed: sbatch failed: QOSMaxSubmit"
    assert message in run.dir.supervisor_log.read_text()
    assert (len(run.events("submitted")), len(run.events("resumed"))) == (1, 1)


def test_run_that_neither_successor_nor_requeue_can_continue_is_resumed(submit_as_user, site):
    """Slurm cancels a preempted job of this partition at once, but the ranks save their state."""
    run = submit_as_user("--qos=small", "--partition=cheap", step_s=0.2)
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
