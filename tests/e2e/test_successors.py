"""Sites without requeue: a stopped run continues in exactly one successor job, with the same losses."""

import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.slurm_versions import new_cluster
from helpers.training_runs import Run, assert_undisturbed, preempt, submit
from helpers.waiting import wait_for

from hpctrain.sandbox import Sandbox

SHAPE = ["--nodes", "2", "--gpus-per-node", "1"]

pytestmark = [pytest.mark.long, pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def site() -> Iterator[Sandbox]:
    """A cluster that does not requeue jobs."""
    with new_cluster("chain", nodes=2, gpus_per_node=1, settings=["JobRequeue=0"]) as cluster:
        yield cluster


def list_jobs(run: Run) -> list[str]:
    """Return all jobs of a run from Slurm's records, independent of the run's own."""
    listed = run_command(["squeue", "--noheader", "--states=all", "--Format=JobID:20,WorkDir:300"], run.env)
    return sorted(line.split()[0] for line in listed.stdout.splitlines() if line.split()[1] == str(run.path))


def assert_chained(run: Run, number: int) -> None:
    """The run has had that many jobs, each the successor of the previous one, and no process is left."""
    submitted = run.events("submitted")
    ids = [event["job_id"] for event in submitted]
    assert sorted(ids) == list_jobs(run)
    assert [event.get("after") for event in submitted] == [None, *ids[:-1]]
    assert len(ids) == number
    assert run.status()["job_id"] == ids[-1]
    assert_no_process_left(run.path)


def wrapped(site: Sandbox, folder: Path, command: str, script: str) -> dict[str, str]:
    """Return the environment in which `script` replaces a Slurm command. In it, REAL is that command."""
    search_path = site.env.get("PATH", os.environ["PATH"])
    wrapper = folder / "bin" / command
    wrapper.parent.mkdir()
    real = str(shutil.which(command, path=search_path))
    wrapper.write_text(script.replace("REAL", real).replace("NOTE", str(folder / "note")))
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    return {**site.env, "PATH": f"{wrapper.parent}:{search_path}"}


def test_preemption_by_an_urgent_job(site, reference, tmp_path):
    run = Run(tmp_path / "run", site.env)
    result = run.hpctrain("submit", "--dry-run", *SHAPE, "--run-dir", str(run.path), str(Path(__file__)))
    printed = result.stdout + result.stderr
    assert "(JobRequeue=0). A run that is preempted" in printed
    assert "continues in a successor job" in printed
    submit(run.path, site.env, SHAPE, step_s=0.2)
    run.wait_for_step(8)
    preempt(run.env, nodes=2, seconds=1)
    assert run.wait() == 0
    assert [event["by"] for event in run.events("requeue")] == ["successor"]
    assert run.events("resumed")[0]["step"] == run.events("signal")[0]["step"]
    assert_undisturbed(run, reference(2))
    assert_chained(run, 2)
    # Its successor waited for no second start of the first job.
    first = run.events("submitted")[0]["job_id"]
    assert " Restarts=0 " in run_command(["scontrol", "show", "job", first], run.env).stdout


def test_pending_successor_can_be_cancelled(site, tmp_path):
    run = submit(tmp_path / "run", site.env, SHAPE, step_s=0.2)
    run.wait_for_step(2)
    blocking = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "-o/dev/null", "--wrap=sleep 60"]
    blocker = run_command([*blocking, "--parsable"], run.env).stdout.strip()
    try:
        wait_for(lambda: len(run.events("submitted")) == 2, 60, "the successor")
        run.wait_for_state("PENDING")
        run.hpctrain("cancel", str(run.path))
        run.wait_for_state("CANCELLED")
    finally:
        run_command(["scancel", blocker], run.env)
    assert_chained(run, 2)


@pytest.mark.parametrize("fault", ["killed after", "killed before", "answer lost", "never answered"])
def test_exactly_one_successor_for_every_submission_fault(site, reference, tmp_path, fault):
    env = wrapped(site, tmp_path, "sbatch", SBATCH.replace("FAULT", fault))
    run = submit(tmp_path / "run", env, SHAPE, step_s=0.2)
    run.wait_for_step(8)
    preempt(run.env, nodes=2, seconds=1)
    assert run.wait() == 0
    assert (tmp_path / "note").read_text().split() == ["once"]
    assert_undisturbed(run, reference(2))
    assert_chained(run, 2)


#: Inside a job, it fails once as configured, whoever calls it.
SBATCH = """#!/bin/sh
tr '\\0' ' ' < /proc/$PPID/cmdline | grep -q hpctrain.supervisor || exec REAL "$@"
[ -e NOTE ] && exec REAL "$@"
echo once > NOTE
say() { echo "sbatch: error: $1" >&2; exit 1; }
case "FAULT" in
    "killed after") REAL "$@"; kill -9 $PPID ;;
    "killed before") kill -9 $PPID ;;
    "answer lost") REAL "$@" > /dev/null; say "Socket timed out on send/recv operation" ;;
    "never answered") say "Unable to contact slurm controller (connect failure)" ;;
esac
"""


#: Requeue is refused, although the site's configuration allows it.
SCONTROL = """#!/bin/sh
[ "$1" = requeue ] && { echo once >> NOTE; echo "slurm_requeue error: Access/permission denied" >&2; exit 1; }
exec REAL "$@"
"""


def test_refused_requeue_continues_in_a_successor(slurm, reference, tmp_path):
    env = wrapped(slurm, tmp_path, "scontrol", SCONTROL)
    run = submit(tmp_path / "run", env, SHAPE, step_s=0.2)
    run.wait_for_step(8)
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    assert (tmp_path / "note").read_text().split() == ["once"]
    assert_undisturbed(run, reference(2))
    assert_chained(run, 2)


def test_start_options_apply_to_the_first_job_only(site, tmp_path):
    """Evaluated again, a relative time would delay the successor, and move the deadline."""

    def field(name: str, job: str) -> str:
        shown = run_command(["squeue", "--noheader", f"--jobs={job}", f"--Format={name}:0"], site.env)
        return shown.stdout.strip()

    starts = ["--begin=now+3", "--dependency=singleton", "--sbatch=deadline=now+1day", "--time=30"]
    run = submit(tmp_path / "run", site.env, SHAPE, options=starts, step_s=0.3)
    run.wait_for_step(2)
    deadline = field("Deadline", run.events("submitted")[0]["job_id"])
    run.hpctrain("requeue", str(run.path))
    wait_for(lambda: len(run.events("submitted")) == 2, 60, "the successor")
    assert field("Deadline", run.events("submitted")[1]["job_id"]) == deadline
    assert run.wait() == 0
    assert_chained(run, 2)
    resumed = run.hpctrain("resume", str(run.path), "--dry-run", "--nodes=1").stdout
    assert "--dependency=singleton" in resumed
    assert "--begin" not in resumed
    assert "--deadline=now+1day" in resumed


def test_dependent_job_waits_for_the_successor(site, tmp_path):
    run = submit(tmp_path / "run", site.env, SHAPE, step_s=0.2)
    run.wait_for_step(2)
    first = run.events("submitted")[0]["job_id"]
    out = tmp_path / "out"
    waiting = ["sbatch", "--partition=urgent", f"--dependency=afterok:{first}", "-o/dev/null"]
    run_command([*waiting, f"--wrap=tail -n1 {run.dir.events} > {out}"], run.env)
    run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    wait_for(lambda: out.exists() and out.read_text().strip(), 60, "the job that depends on the run")
    assert json.loads(out.read_text())["kind"] == "finished"


def test_successor_of_an_array_task_leaves_other_tasks_alone(site, tmp_path):
    run = Run(tmp_path / "run", site.env)
    script = SCRIPTS / "train_classifier.py"
    shape = ["--nodes", "1", "--gpus-per-node", "1", "--array", "0-1"]
    run.hpctrain("submit", *shape, "--run-dir", str(run.path), str(script), "--step-s", "0.2")
    tasks = [Run(run.path / f"task-{index}", site.env) for index in range(2)]
    for task in tasks:
        task.wait_for_step(3)
    array = run.events("submitted")[0]["job_id"]
    tasks[1].hpctrain("requeue", str(tasks[1].path))
    assert run.wait() == 0
    (single,), chain = tasks[0].events("submitted"), tasks[1].events("submitted")
    assert single["job_id"] == f"{array}_0"
    assert chain[0]["job_id"] == chain[1]["after"] == f"{array}_1"
    assert chain[1]["job_id"].endswith("_1")
    assert tasks[0].events("signal") == []
    assert tasks[0].losses() == tasks[1].losses()
    assert_no_process_left(run.path)
