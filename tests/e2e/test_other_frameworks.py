"""Unmodified scripts under faults: plain DDP, Lightning and Accelerate, with their own checkpoints.

The scripts of `examples/` run on two ranks on two nodes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers import REPOSITORY
from helpers.commands import run_command
from helpers.processes import assert_no_process_left
from helpers.training_runs import RUN_LIMIT_S, Run, preempt
from helpers.waiting import wait_for

#: A stop of Lightning may take half a minute: its own SIGTERM handler can deadlock two ranks.
pytestmark = pytest.mark.timeout(400)

SHAPE = ["--nodes", "2", "--ntasks-per-node", "1"]
STEPS = ["--save-every", "100", "--max-steps"]
#: Enough for a fault long before the end.
MAX_STEPS = 1500


@dataclass(frozen=True)
class Script:
    """An example script and the lines it prints."""

    name: str
    resumed: str
    """What rank 0 prints where it goes on from a checkpoint."""
    finished: str
    """What it prints last."""
    world: str
    """What it prints or leaves in its checkpoint where two ranks train together."""
    args: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return REPOSITORY / "examples" / f"{self.name}.py"

    def argv(self, max_steps: int) -> list[str]:
        return [str(self.path), *self.args, *STEPS, str(max_steps)]


PLAIN = Script("plain_ddp", "continued after step", "step {}: loss", "plain_ddp.pt")
LIGHTNING = Script(
    "lightning_sine",
    "Restored all states from the checkpoint",
    "trained {} steps",
    "Starting with 2 processes",
    ("--num-nodes", "2"),
)
ACCELERATE = Script("accelerate_sine", "continued after step", "trained {} steps", "random_states_1.pkl")


def long(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.fixture
def backend(request) -> tuple[dict[str, str], list[str]]:
    """Return the environment and options of the backend to run on."""
    if request.param == "local":
        return {}, ["--backend", "local", *SHAPE]
    return request.getfixturevalue("slurm").env, SHAPE


def submit(backend, path: Path, script: Script) -> Run:
    """Submit the script and wait for its first checkpoint."""
    env, shape = backend
    run = Run(path, env)
    run.hpctrain("submit", *shape, "--run-dir", str(path), *script.argv(MAX_STEPS))
    saved = run.dir.checkpoints
    wait_for(lambda: saved.exists() and any(saved.iterdir()), 100, f"the first checkpoint of {script.name}")
    return run


def assert_resumed_and_completed(run: Run, script: Script) -> None:
    """No attempt started from the beginning, and the last step was trained."""
    first, *_, last = (run.dir.rank_log(attempt, 0).read_text() for attempt in run.dir.attempts())
    assert script.resumed not in first
    assert script.finished.format(MAX_STEPS) not in first
    assert script.resumed in last
    assert script.finished.format(MAX_STEPS) in last
    assert run.status()["state"] == "COMPLETED"
    assert_no_process_left(run.path)


@contextlib.contextmanager
def paused(run: Run) -> Iterator[None]:
    """Stop the ranks inside the block, so that they do not finish before the fault."""
    pids = [process.pid for process in run.ranks().values()]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    ("script", "backend"),
    [
        long(PLAIN, "local"),
        long(LIGHTNING, "local"),
        long(ACCELERATE, "local"),
        long(PLAIN, "slurm"),
        long(LIGHTNING, "slurm"),
        long(ACCELERATE, "slurm"),
    ],
    indirect=["backend"],
    ids=lambda it: getattr(it, "name", it),
)
def test_kill_of_a_rank(script, backend, tmp_path):
    run = submit(backend, tmp_path / "run", script)
    run.kill_rank(1)
    assert run.wait() == 0
    assert [failure["rank"] for failure in run.events("failure")] == [1]
    assert len(run.events("restart")) == 1
    assert [event["attempt"] for event in run.events("checkpoint")] == [0, 1]
    assert_resumed_and_completed(run, script)


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "backend"),
    [
        (PLAIN, "local"),
        long(LIGHTNING, "local"),
        long(ACCELERATE, "local"),
        long(PLAIN, "slurm"),
        long(LIGHTNING, "slurm"),
        long(ACCELERATE, "slurm"),
    ],
    indirect=["backend"],
    ids=lambda it: getattr(it, "name", it),
)
def test_requeue(script, backend, tmp_path):
    run = submit(backend, tmp_path / "run", script)
    with paused(run):
        run.hpctrain("requeue", str(run.path))
    assert run.wait() == 0
    assert len(run.events("requeue")) == 1
    assert run.events("failure") == []
    assert_resumed_and_completed(run, script)


@pytest.mark.parametrize("script", [long(PLAIN), long(LIGHTNING), long(ACCELERATE)], ids=lambda it: it.name)
def test_preemption_by_an_urgent_job(script, slurm, tmp_path):
    run = submit((slurm.env, SHAPE), tmp_path / "run", script)
    with paused(run):
        preempt(slurm.env, seconds=1)
        wait_for(lambda: _is_preempted(run), 30, "the preemption")
    assert run.wait() == 0
    assert run.events("failure") == []
    assert_resumed_and_completed(run, script)


def _is_preempted(run: Run) -> bool:
    """True if Slurm has sent the ranks its stop signal and SIGCONT, which it does together."""
    return all("stopped" not in _state(process.pid) for process in run.ranks().values())


def _state(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    return next(line for line in text.splitlines() if line.startswith("State:"))


@pytest.mark.parametrize("script", [PLAIN, long(LIGHTNING), long(ACCELERATE)], ids=lambda it: it.name)
def test_script_under_srun_and_exec(script, slurm, tmp_path):
    """Without a supervisor, the ranks agree on a port themselves."""
    step = ["srun", "-N2", "--ntasks-per-node=1", sys.executable, "-m", "hpctrain", "exec", "--"]
    env = {**slurm.env, "OMP_NUM_THREADS": "1"}
    command = [*step, sys.executable, *script.argv(200)]
    result = run_command(command, env, cwd=tmp_path, timeout=RUN_LIMIT_S, check=False)
    # exec has become the script, and torch may abort it at interpreter exit (see runtime/gloo_shutdown.py).
    aborted = "terminate called without an active exception" in result.stderr
    assert result.returncode == (134 if aborted else 0), result.stderr
    assert script.finished.format(200) in result.stdout
    files = [path.name for path in (tmp_path / "checkpoints").rglob("*")]
    assert script.world in result.stdout + result.stderr or script.world in files
    if script is PLAIN:
        assert result.stdout.count("step 200: loss") == 1
