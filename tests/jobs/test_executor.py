"""submitit's interface with a fake supervisor: no function is called here."""

import pickle
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import submitit
from helpers.waiting import wait_for

from hpctrain import Executor
from hpctrain.errors import RunFailed, RunNotFound, SpecError, UserError
from hpctrain.files import is_locked
from hpctrain.jobs.backends.local import LocalBackend
from hpctrain.jobs.executor import Job, JobFailed
from hpctrain.jobs.executor import job as job_module
from hpctrain.jobs.runs.run import find_run
from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.rundir import RunDir

#: They start many processes or trainings, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow


@pytest.fixture
def executor(tmp_path, fake_interpreter):
    return Executor(tmp_path / "runs", backend="local", code_snapshot=False)


def add(a, b=0):
    return a + b


def spec_of(job: Job[object]) -> JobSpec:
    return load_spec(job.run.dir.spec)


def wait_for_array(jobs: list[Job[object]]) -> None:
    for job in jobs:
        job.wait()
    array = RunDir(jobs[0].run.dir.path.parent)
    wait_for(lambda: not is_locked(array.lock), 20, "the end of the array's supervisor")


def test_job_is_a_run_named_after_the_function(executor, tmp_path):
    job = executor.submit(add, 1, b=2)
    assert isinstance(job, submitit.Job)
    assert isinstance(executor, submitit.Executor)
    assert job.run.dir.path.parent == tmp_path / "runs"
    assert job.run.run_id.startswith("add-")
    assert job.job_id == job.run.job_id
    spec = spec_of(job)
    assert (spec.name, spec.workdir) == ("add", str(Path.cwd()))
    job.wait()
    assert (job.state, job.done()) == ("COMPLETED", True)
    assert job.stdout() == job.stderr() == "hello from attempt 0\n"
    assert job.paths.stdout.read_text() == "hello from attempt 0\n"
    assert job.paths.folder == job.run.dir.path
    assert job.paths.submission_file == job.run.dir.job_script
    assert job.get_info()["JobID"] == job.job_id
    assert job.submission().result() == 3
    assert "COMPLETED" in repr(job)


def test_ranks_without_logs_show_the_log_of_the_job(executor):
    executor.update_parameters(nodes=2, ntasks_per_node=2)
    job = executor.submit(add, 1)
    job.wait()
    log = job.run.dir.slurm_log
    log.write_text("ImportError: shadowed\n")
    replacement = f"of run {job.run.run_id} wrote no log. Output of the job ({log}):\nImportError: shadowed\n"
    assert job.stdout() == f"hello from attempt 0\n\nRanks 1-3 {replacement}"
    assert job.task(2).stderr() == f"Rank 2 {replacement}"
    assert job.task(0).stdout() == "hello from attempt 0\n"
    log.write_text("")
    assert "The job printed no output either." in job.task(2).stdout()
    job.run.dir.supervisor_log.write_text("step 0 was refused\n")
    assert job.task(2).stdout().endswith("supervisor.log):\nstep 0 was refused\n")


def test_ranks_of_a_job_are_tasks(executor):
    executor.update_parameters(nodes=2, ntasks_per_node=2)
    job = executor.submit(add, 1)
    job.wait()
    assert job.num_tasks == 4
    assert [job.task(i).paths.result_pickle.name for i in range(4)] == [
        f"attempt-000-rank-0000{i}.pkl" for i in range(4)
    ]
    with pytest.raises(UserError, match="4 ranks"):
        job.result()


def test_results_of_all_ranks_need_one_look_at_the_outcome(executor, monkeypatch):
    executor.update_parameters(ntasks_per_node=4)
    job = executor.submit(add, 1)
    job.wait()
    for rank in range(4):
        path = job.run.dir.result(0, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(rank))
    reads, read = [], job_module.read_run_record
    monkeypatch.setattr(job_module, "read_run_record", lambda run: reads.append(run) or read(run))
    assert job.results() == [0, 1, 2, 3]
    assert len(reads) == 1


def test_parameters_have_the_names_of_submit_or_submitit(executor):
    executor.update_parameters(
        timeout_min=90, mem_gb=1.5, slurm_partition="gpu", cpus_per_task=2, name="n", ntasks_per_node=2
    )
    assert executor.parameters == {
        "backend": "local",
        "code_snapshot": False,
        "time": "01:30:00",
        "mem": "1536M",
        "partition": "gpu",
        "cpus_per_task": 2,
        "name": "n",
        "ntasks_per_node": 2,
    }
    executor.update_parameters(partition=None, timeout_min=None, mem_gb=None)
    job = executor.submit(add, 1)
    spec = spec_of(job)
    assert (spec.cpus_per_task, spec.name, spec.time_limit_s, spec.directives) == (2, "n", None, {})
    job.wait()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("node", "'nodes'"),
        ("slurm_partitions", "'partition'"),
        ("gpus", "mean 'gpus_per_node'"),
        ("run_dir", "`folder`"),
    ],
)
def test_unknown_parameter_gets_a_suggestion(executor, name, hint):
    with pytest.raises(SpecError, match=f"(?s){name}.*{hint}|{hint}"):
        executor.update_parameters(**{name: 1})
    with pytest.raises(SpecError):
        Executor(**{name: 1})


def test_unpicklable_argument_is_refused_before_anything_is_written(executor, tmp_path):
    with pytest.raises(UserError, match=r"add\(\): argument b.* _thread.lock"):
        executor.submit(add, 1, b=[threading.Lock()])
    assert not (tmp_path / "runs").exists()


def test_batch_is_submitted_at_the_end_of_its_block(executor, tmp_path):
    with executor.batch():
        jobs = [executor.submit(add, i) for i in range(3)]
        assert not (tmp_path / "runs").exists()
        assert all(isinstance(job, submitit.Job) for job in jobs)
        with pytest.raises(AttributeError):
            _ = jobs[0].job_id
    assert [job.submission().args for job in jobs] == [(0,), (1,), (2,)]
    (array,) = (tmp_path / "runs").iterdir()
    assert [job.run.dir.path for job in jobs] == [array / f"task-{i}" for i in range(3)]
    assert [job.job_id for job in jobs] == [
        f"{find_run(array.name, array.parent, {}).job_id}_{i}" for i in range(3)
    ]
    assert executor.job(f"{array.name}/task-1").job_id == jobs[1].job_id
    with pytest.raises(SpecError, match=f"is a job array. .* such as {array}/task-0"):
        executor.job(array.name)
    with suppress(ZeroDivisionError), executor.batch():
        executor.submit(add, 1 // 0)
    assert list((tmp_path / "runs").iterdir()) == [array]
    wait_for_array(jobs)


def test_config_files_apply_except_for_array(executor, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hpctrain.yaml").write_text("array: 0-3\nnodes: 2\nrun_dir: elsewhere\n")
    job = executor.submit(add, 1)
    spec = spec_of(job)
    assert (spec.nodes, spec.array, spec.run_dir) == (2, None, str(job.run.dir.path))
    assert job.num_tasks == 2
    assert job.run.dir.path.parent == tmp_path / "runs"
    job.wait()


def test_job_can_be_restored_after_its_program_ended(executor, monkeypatch):
    monkeypatch.setenv("SECRET", "do not write me down")
    executor.update_parameters(nodes=2)
    job = executor.submit(add, 1)
    job.wait()
    data = pickle.dumps(job)
    assert b"do not write me down" not in data
    for restored in (pickle.loads(data), executor.job(job.run.run_id), executor.job(str(job.run.dir.path))):
        assert (restored.job_id, restored.num_tasks, restored.state) == (job.job_id, 2, "COMPLETED")
        assert restored.run.environ["SECRET"] == "do not write me down"
    with pytest.raises(RunNotFound):
        executor.job("no-such-run")


def test_missing_result_is_reported(executor, monkeypatch):
    monkeypatch.setattr(job_module, "_RESULT_TIMEOUT_S", 0.1)
    job = executor.submit(add, 1)
    with pytest.raises(RunFailed, match=r"Rank 0 of run add-.* wrote no result: .*rank-00000\.pkl"):
        job.result()


def test_one_query_serves_all_jobs(executor, monkeypatch):
    queries = []
    query = LocalBackend.query
    monkeypatch.setattr(
        LocalBackend, "query", lambda backend, jobs: queries.append(len(jobs)) or query(backend, jobs)
    )
    jobs = executor.map_array(add, range(3))
    Job.watcher.update()
    assert queries[0] >= 1
    assert len(queries) <= len(jobs) + 1
    wait_for_array(jobs)
    queries.clear()
    assert [job.state for job in jobs] == ["COMPLETED"] * 3, [job.run.status() for job in jobs]
    Job.watcher.update()
    assert queries == []


def test_job_error_survives_pickling_and_is_of_the_last_attempt(executor):
    job = executor.submit(add, 1)
    job.wait()
    run = job.run.dir
    run.log_event("failure", 0, rank=3, host="n2", cause="rank 3 on n2: ValueError: x", log="/old.log")
    run.log_event("finished", 0, state="FAILED", exit_code=4, cause="rank 3 on n2: ValueError: x")
    error = pickle.loads(pickle.dumps(JobFailed.from_status(job.run.status())))
    assert (error.rank, error.host, error.log) == (3, "n2", "/old.log")
    assert f"Run {job.run.run_id} failed: rank 3 on n2: ValueError: x. Log: /old.log" in str(error)
    run.log_event("finished", 1, state="FAILED", exit_code=4, cause="the ranks did not leave in time")
    failure = JobFailed.from_status(job.run.status())
    assert (failure.rank, failure.host) == (None, None)
    assert "did not leave in time" in str(failure)
