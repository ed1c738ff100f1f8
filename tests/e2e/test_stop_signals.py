"""Stop signals in any phase of a run, once or twice: it saves or exits, and then resumes."""

import os
import signal
from pathlib import Path

import pytest
from helpers import SCRIPTS
from helpers.training_runs import Run, assert_undisturbed, preempt, submit, submit_script
from helpers.waiting import wait_for

from hpctrain.slurm.command import list_rank_steps, run_slurm

SHAPES = {
    "local": ["--backend", "local", "--nodes", "2", "--ntasks-per-node", "1"],
    "slurm": ["--nodes", "2", "--gpus-per-node", "1"],
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["local", "slurm"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def env(backend: str, request: pytest.FixtureRequest) -> dict[str, str]:
    return request.getfixturevalue("slurm").env if backend == "slurm" else {}


def submit_pausing(folder: Path, phase: str, backend: str, env: dict[str, str]) -> Run:
    return submit(folder / "run", env, SHAPES[backend], step_s=0.0, further=["--pause", phase])


def send_stop(run: Run) -> None:
    """Send the ranks Slurm's first signal of a preemption, or signal the local job."""
    job = run.events("submitted")[0]["job_id"]
    if "SLURM_CONF" not in run.env:
        os.kill(int(job), signal.SIGUSR2)
        return
    environ = {**os.environ, **run.env}
    step = wait_for(lambda: list_rank_steps([job], environ), 10, "the step of the ranks")
    run_slurm(["scancel", "--signal=TERM", *step], environ)


def wait_for_phase(run: Run, phase: str) -> None:
    wait_for((run.path / f"{phase}-0").exists, 60, f"phase {phase}", interval=0.01)


def assert_requeued_and_completed(run: Run, reference: Run) -> None:
    assert run.wait() == 0
    assert_undisturbed(run, reference)
    assert len(run.events("requeue")) == 1


@pytest.mark.long
@pytest.mark.parametrize("phase", ["start", "validation", "save"])
def test_stop_in_any_phase_resumes(reference, tmp_path, phase, backend, env):
    run = submit_pausing(tmp_path, phase, backend, env)
    wait_for_phase(run, phase)
    send_stop(run)
    assert_requeued_and_completed(run, reference(2))
    assert run.events("failure") == []
    assert [stop["saved"] for stop in run.events("signal")] == ([] if phase == "start" else [True])


@pytest.mark.long
def test_second_stop_during_a_save_does_no_harm(reference, tmp_path, backend, env):
    run = submit_pausing(tmp_path, "save", backend, env)
    wait_for(lambda: max(run.losses(), default=0) >= 1, 60, "the first step", interval=0.01)
    send_stop(run)
    wait_for_phase(run, "save")
    send_stop(run)
    assert_requeued_and_completed(run, reference(2))
    assert [stop["saved"] for stop in run.events("signal")] == [True]


@pytest.mark.long
def test_stop_during_a_restart_of_the_ranks_resumes(reference, tmp_path, backend, env):
    run = submit(tmp_path / "run", env, SHAPES[backend], step_s=0.1)
    run.wait_for_step(8)
    run.kill_rank(1)
    wait_for(lambda: len(run.events("started")) == 2, 60, "the second start", interval=0.01)
    send_stop(run)
    assert_requeued_and_completed(run, reference(2))
    assert len(run.events("failure")) == 1


PHASES = ["start", "compile", "warm-up", "data", "evaluation", "save", "own loop"]


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param(
            phase, marks=pytest.mark.extended if phase in ("compile", "own loop") else pytest.mark.long
        )
        for phase in PHASES
    ],
)
def test_all_ranks_exit_within_the_grace_time_in_any_phase(tmp_path, phase):
    """The supervisor would kill them only after minutes."""
    grace_s = 30 if phase == "save" else 6
    options = ["--backend=local", "--nodes=2", "--ntasks-per-node=1", "--standby-workers=never"]
    options.append(f"--env=HPCTRAIN_STOP_GRACE=SIGTERM={grace_s}")
    run = submit_script(tmp_path, SCRIPTS / "block_in_phase.py", phase, options=options)
    wait_for((run.path / "entered").exists, 100, f"phase {phase}")
    send_stop(run)
    assert run.wait(100) == 0, run.describe()
    assert run.events("failure") == run.events("restart") == run.events("excluded") == []
    assert [event["class"] for event in run.events("requeue")] == ["preempted"]
    log = run.dir.supervisor_log.read_text()
    assert [f"rank {rank} exited with code 75" in log for rank in range(2)] == [True, True], log
    assert "killed" not in log
    assert bool(run.events("resumed")) is (phase in ("data", "evaluation", "save"))


#: A rank whose handler uses the process group, as Lightning's does, and is aborted in the collective.
ABORTING = """
import os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
def stop(*_):
    print("stopping", flush=True)
    time.sleep(0.1)
    os.abort()
signal.signal(signal.SIGTERM, stop)
layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(10_000 if os.environ["HPCTRAIN_ATTEMPT"] == "0" else 5):
    layer(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    time.sleep(0.05)
"""


@pytest.mark.extended
def test_abort_after_a_preemption_is_part_of_the_stop(slurm, tmp_path):
    run = submit_script(tmp_path, ABORTING, options=["--nodes=2", "--ntasks-per-node=1"], env=slurm.env)
    wait_for(run.dir.metrics.exists, 150, "a step")
    preempt(slurm.env, seconds=1)
    assert run.wait() == 0, run.describe()
    assert "stopping" in run.dir.rank_log(0, 0).read_text()
    assert [event["class"] for event in run.events("requeue")] == ["preempted"]
    assert run.events("failure") == run.events("excluded") == run.events("restart") == []
