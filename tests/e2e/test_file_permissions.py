"""Permissions of the files of a run, under any umask."""

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers.commands import environment, run_command
from helpers.training_runs import submit_script
from helpers.waiting import wait_for

from hpctrain import Executor, RunFailed
from hpctrain.jobs.runs import run as jobs
from hpctrain.slurm.states import RunState

SCRIPT = """
import torch
import hpctrain

class Tiny(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = hpctrain.Trainer(
    max_steps=4, global_batch_size=4, checkpoint_every=2, loggers=["csv"], record_samples=True
)
trainer.fit(Tiny(), torch.ones(16, 4))
raise RuntimeError("so that there is a failure file")
"""

#: Files and folders that only the owner may read; the umask applies to all others.
PRIVATE = ("spec.yaml", "job.sbatch", "supervisor.lock", "code")


@pytest.fixture
def umask(request) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


@pytest.mark.extended
@pytest.mark.parametrize("umask", [0o002, pytest.param(0o077, marks=pytest.mark.long)], indirect=True)
def test_only_the_owner_writes_and_reads_private_files(tmp_path, umask):
    project = tmp_path / "project"
    project.mkdir()
    (project / "job.py").write_text(SCRIPT)
    run_command(["git", "init", "-q", project])
    run = submit_script(tmp_path, project / "job.py", options=["--backend=local", "--max-failures=1"])
    assert run.wait() == 4, run.describe()
    run.hpctrain("report", str(run.path))
    entries = [run.path, *run.path.rglob("*")]
    modes = {path.relative_to(run.path).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in entries}
    inside_private = tuple(f"{name}/" for name in PRIVATE)
    for name, mode in modes.items():
        if name in PRIVATE:
            assert mode == (0o700 if name == "code" else 0o600), (name, oct(mode))
        elif not name.startswith(inside_private):
            every = 0o755 if (run.path / name).is_dir() else 0o644
            assert mode == every & ~umask, (name, oct(mode))
    expected = {"metrics.jsonl", "metrics.csv", "events.jsonl", "environment.jsonl", "report.html"}
    expected |= {"checkpoints/step-00000004/manifest.json", "logs/attempt-000/rank-00000.log", *PRIVATE}
    expected |= {"failures/attempt-000-rank-00000.json", "samples/attempt-000-rank-00000.jsonl", "code"}
    assert expected <= modes.keys()


@contextmanager
def another_user() -> Iterator[None]:
    """Act as another user inside the block."""
    if os.geteuid() != 0:
        pytest.skip("acting as another user takes root")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that every user can enter; pytest closes its own to others."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_other_user_reads_public_files_but_can_neither_lock_nor_read_private_ones(open_to_all):
    run = submit_script(open_to_all, "import time; time.sleep(60)")
    try:
        wait_for(lambda: run.events("started"), 60, "the start")
        submitted = jobs.Run(run.dir, environment())
        assert submitted.status().state is RunState.RUNNING
        with another_user():
            for path in (run.dir.lock, run.dir.spec, run.dir.job_script):
                with pytest.raises(PermissionError):
                    os.open(path, os.O_RDONLY)
            assert run.events("started")
            status = submitted.status()
        assert status.state is RunState.UNKNOWN
        assert "and only that user can read the state" in status.words
    finally:
        run.hpctrain("cancel", str(run.path))
        run.wait()


def answer() -> int:
    return 42


def fail() -> None:
    raise ValueError("no")


@pytest.mark.long
@pytest.mark.parametrize("umask", [0o002], indirect=True)
def test_pickles_are_private(tmp_path, umask):
    executor = Executor(tmp_path / "runs", backend="local", code_snapshot=False, max_failures=1)
    good, bad = executor.submit(answer), executor.submit(fail)
    assert good.result() == 42
    with pytest.raises(RunFailed):
        bad.result()
    pickles = list((tmp_path / "runs").rglob("*.pkl"))
    assert {path.parent.name for path in pickles} >= {"results", "failures"}
    assert "function.pkl" in {path.name for path in pickles}
    for path in pickles:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        assert not path.parent.stat().st_mode & 0o022, path
