"""Several jobs may continue a run, and only one of them trains."""

from types import SimpleNamespace

import pytest
from helpers.run_histories import make_spec
from msgspec.structs import replace

from hpctrain.files import read_json_lines
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.rundir import RunDir
from hpctrain.supervisor import acquire_run
from hpctrain.supervisor.acquire_run import NotInJob, check_in_job, register_job


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch):
    monkeypatch.setattr(acquire_run, "_RECORD_LIMIT_S", 0.0)


@pytest.fixture
def run(tmp_path) -> RunDir:
    run = RunDir(tmp_path)
    run.log_event("submitted", 0, job_id="7", backend="slurm")
    return run


@pytest.fixture
def spec(run) -> JobSpec:
    return make_spec(run.path)


def newest_job(run):
    return [event["job_id"] for event in read_json_lines(run.events) if event["kind"] == "submitted"][-1]


@pytest.mark.parametrize("job_id", ["8", "6"])
def test_only_the_newest_recorded_job_trains(run, spec, job_id):
    """Job 8 was not submitted by hpctrain; the run was submitted again after job 6."""
    before = list(read_json_lines(run.events))
    with pytest.raises(NotInJob, match=rf"Job {job_id} was not submitted by .* use hpctrain resume "):
        register_job(run, spec, job_id)
    assert list(read_json_lines(run.events)) == before
    register_job(run, spec, "7")


def test_first_job_is_recorded_if_submit_was_killed(tmp_path, spec):
    run = RunDir(tmp_path / "new")
    run.path.mkdir()
    register_job(run, spec, "8")
    assert newest_job(run) == "8"


def test_requeued_job_of_a_failed_run_exits_with_its_code(run, spec, capsys):
    """Slurm requeues a job that is preempted, or loses a node, while its supervisor is exiting."""
    run.log_event("finished", 0, state="FAILED", exit_code=4, cause="x")
    job_control = SimpleNamespace(job_id="7", successors=SimpleNamespace(predecessor=None))
    assert acquire_run.acquire_run(run, spec, job_control) == 4
    assert f"To continue the run, use hpctrain resume {run.path}" in capsys.readouterr().out


def test_one_of_two_successors_continues_after_the_other_was_recorded(run, spec):
    """Slurm accepted job 8 so late that the supervisor also submitted, and recorded, job 9."""
    run.log_event("handover", 0, job_id="7")
    run.log_event("submitted", 1, job_id="9", backend="slurm", after="7")
    lease = SimpleNamespace(acquire=lambda predecessor, deaths: None)
    found = {}
    for job_id in ("8", "9"):
        successors = SimpleNamespace(predecessor="7", lease=lease, restarts=0)
        job_control = SimpleNamespace(job_id=job_id, successors=successors)
        found[job_id] = acquire_run.acquire_run(run, spec, job_control)
    assert found == {"8": None, "9": 0}
    assert newest_job(run) == "8"


@pytest.mark.parametrize("array", [None, "0-1"])
def test_slurm_script_must_run_in_a_job(run, spec, array):
    spec = replace(spec, array=array)
    with pytest.raises(NotInJob, match=r"This process was not submitted by hpctrain"):
        check_in_job(run, spec, {})
    job_variables = {"SLURM_JOB_ID": "8", "SLURM_JOB_NODELIST": "n1"}
    if array is None:
        check_in_job(run, spec, job_variables)
    else:
        with pytest.raises(NotInJob, match="This process"):
            check_in_job(run, spec, job_variables)
