"""Functions as jobs, on a real Slurm and with the local backend."""

import json
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

import executor_functions
import pytest
import submitit
from executor_functions import Count
from helpers.commands import environment, run_command
from helpers.processes import assert_no_process_left
from helpers.waiting import wait_for

from hpctrain import Executor
from hpctrain.files import read_json_lines
from hpctrain.jobs.executor import Job
from hpctrain.jobs.runs.run import list_runs

pytestmark = pytest.mark.timeout(300)

LOCAL = pytest.mark.parametrize("backend", ["local"], indirect=True)
SLURM = pytest.mark.parametrize("backend", [pytest.param("slurm", marks=pytest.mark.slurm)], indirect=True)


@pytest.fixture
def backend(request, monkeypatch) -> str:
    """The environment of a user of that backend, set in this process."""
    name: str = request.param
    env = environment(request.getfixturevalue("slurm").env if name == "slurm" else {})
    for variable in os.environ.keys() - env.keys():
        monkeypatch.delenv(variable)
    for variable, value in env.items():
        monkeypatch.setenv(variable, value)
    return name


@pytest.fixture
def executor(backend, tmp_path) -> Iterator[Executor]:
    """Two nodes; active runs are cancelled at the end, and no process is left."""
    executor = Executor(tmp_path / "runs", backend=backend, nodes=2, code_snapshot=False)
    yield executor
    runs = list_runs(tmp_path / "runs", os.environ)
    for run in runs:
        run.cancel()
    for run in runs:
        run.wait_for_end(timeout=120)
        for task in (run, *run.tasks()):
            assert_no_process_left(task.dir.path, timeout=30)


def wait_for_step(job: Job[Any], step: int) -> None:
    file = job.run.dir.path / "step-0"
    wait_for(lambda: file.exists() and int(file.read_text() or 0) >= step, 60, f"step {step} of {job}")


@pytest.mark.extended
@SLURM
def test_every_rank_has_a_result_and_the_process_group(executor, backend):
    executor.update_parameters(gpus_per_node=1)
    job = executor.submit(executor_functions.introduce, base=10)
    assert isinstance(job, submitit.Job)
    assert job.results() == [(rank, 2, 21.0) for rank in range(2)]
    assert job.task(1).result() == (1, 2, 21.0)
    assert (job.state, job.done(), job.exception()) == ("COMPLETED", True, None)
    assert job.task(1).stdout().count("rank 1 says hello") == 1
    assert [job.stdout().count(f"rank {rank} says hello") for rank in range(2)] == [1, 1]
    assert job.run.status().backend == backend


@pytest.mark.long
@SLURM
def test_preempted_training_returns_the_undisturbed_result(executor):
    undisturbed = executor.submit(executor_functions.train, step_s=0.0)
    job = executor.submit(executor_functions.train, step_s=0.1)
    submitted = job.run.dir.function.read_bytes()
    steps = lambda: [record["step"] for record in read_json_lines(job.run.dir.metrics)]  # noqa: E731
    wait_for(lambda: max(steps(), default=0) >= 10, 60, "step 10")
    job.run.requeue()
    results = job.results()
    assert len(job.run.dir.attempts()) == 2
    assert results == undisturbed.results()
    assert results[0] == results[1]
    assert job.run.dir.function.read_bytes() == submitted


@pytest.mark.long
@LOCAL
def test_all_ranks_of_a_function_stop_after_the_same_step(executor):
    job = executor.submit(executor_functions.count_with_own_file, 30)
    wait_for_step(job, 5)
    job.run.requeue()
    (first, last), other = job.results()
    assert 5 <= first < last == 30
    assert other == (first, last)
    assert "stop requested by SIGTERM" in job.task(0).stdout()


@pytest.mark.long
@LOCAL
def test_checkpoint_method_is_called_on_all_ranks_and_sets_the_next_call(executor):
    job = executor.submit(Count(), 20)
    submitted = job.run.dir.function.read_bytes()
    wait_for_step(job, 5)
    job.run.requeue()
    (last, starts), other = job.results()
    assert (last, len(starts)) == (20, 2)
    assert starts[0] == 0 < 5 <= starts[1]
    assert other == (last, starts)
    assert job.run.dir.function.read_bytes() == submitted


PROGRAM = """
import dataclasses, json, sys
import submitit
import hpctrain, mine


@dataclasses.dataclass
class Answer:
    value: int


def make(number):
    double = lambda x: 2 * x

    def closure(base):
        return Answer(mine.sum_over_ranks(double(mine.add(base, number))))

    return closure


executor = hpctrain.Executor("runs", backend="local")
with executor.batch():
    jobs = [executor.submit(make(3), 4), executor.submit(mine.environment)]
assert "torch" not in sys.modules
answer, seen = [job.result() for job in jobs]
assert isinstance(answer, Answer), answer
print(json.dumps([answer.value, seen]))
"""

MODULE = """
import os
import submitit

def add(a, b):
    return a + b

def environment():
    job = submitit.JobEnvironment()
    return [__file__, os.getcwd(), job.global_rank, job.num_tasks, job.num_nodes, job.hostnames]

def sum_over_ranks(value):
    import torch
    import torch.distributed as dist
    total = torch.tensor(value)
    dist.all_reduce(total)
    return total.item()
"""


@pytest.mark.long
def test_functions_of_the_program_and_its_modules_are_sent(tmp_path):
    (tmp_path / "experiments").mkdir()
    program = tmp_path / "experiments" / "launch.py"
    program.write_text(PROGRAM)
    program.with_name("mine.py").write_text(MODULE)
    run_command(["git", "init", "--quiet"], cwd=tmp_path)
    result = run_command([sys.executable, "experiments/launch.py"], cwd=tmp_path, timeout=100)
    value, seen = json.loads(result.stdout.splitlines()[-1])
    assert value == 14
    assert re.fullmatch(f"{tmp_path}/runs/functions-.*/code/.*/experiments/mine.py", seen.pop(0))
    assert seen == [str(tmp_path), 0, 1, 1, ["local-0"]]
