"""`hpctrain verify`: undisturbed and disturbed runs are identical, and every change is identified."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import SCRIPTS
from helpers.commands import environment, run_command
from helpers.disturbed_runs import train
from helpers.processes import assert_no_process_left
from helpers.training_runs import Run, submit, submit_script
from helpers.waiting import wait_for

pytestmark = [pytest.mark.timeout(400), pytest.mark.extended]

TWO_RANKS = ["--backend", "local", "--ntasks-per-node", "2", "--standby-workers", "never"]

SCRIPT = """
import torch
from torch import nn

import hpctrain


class Net(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return (self.net(x).squeeze(1) - y).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = hpctrain.Trainer(max_steps=12, global_batch_size=4, checkpoint_every=4, seed=0)
trainer.fit(Net(), tuple(torch.load("data.pt")))
"""

PAUSE = """
import os
import time

if "PAUSED" in os.environ:
    open(os.environ["PAUSED"], "w").close()
    time.sleep(100)
"""


def verify(run: Run, *options: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Verify a run, and check that it stays unchanged, and that nothing else is left."""
    before = contents(run.path)
    scratch = run.path.parent / "scratch"
    scratch.mkdir(exist_ok=True)
    command = ["verify", str(run.path), "--scratch-dir", str(scratch), "--json", *options]
    done = Run(run.path, env or {}).hpctrain(*command, check=False, timeout=200)
    assert contents(run.path) == before
    assert list(scratch.iterdir()) == []
    assert done.returncode in (0, 4), done.stderr + done.stdout
    assert done.stdout, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert done.returncode == (0 if result["identical"] else 4)
    return result


def assert_identical(run: Run, first: int = 1, **options: Any) -> dict[str, Any]:
    result = verify(run, **options)
    assert result["identical"], result
    last = max(run.losses())
    assert (result["first_step"], result["last_step"]) == (first, last)
    assert result["steps_compared"] == last - first + 1
    assert result["state"]["step"] == last
    assert result["state"]["tensors"] > 0
    return result


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    """Return size and time of the last change of all files."""
    stats = {str(path): path.stat() for path in folder.rglob("*")}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}


def copy_of(run: Run, folder: Path) -> Run:
    shutil.copytree(run.path, folder / "copy")
    return Run(folder / "copy", {})


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Run:
    """A run whose rank 1 was killed once; the last checkpoints are those of the steps 42, 48 and 52."""
    run = submit(tmp_path_factory.mktemp("killed") / "run", {}, TWO_RANKS, step_s=0.1)
    run.wait_for_step(20)
    run.kill_rank(1)
    assert run.wait() == 0
    assert len(run.events("failure")) == 1
    return run


@pytest.fixture
def own_script(tmp_path) -> Run:
    """A run of a script without a code snapshot, with its data in a file."""
    torch.save([torch.eye(4).repeat(12, 1), torch.arange(48.0)], tmp_path / "data.pt")
    run = submit_script(tmp_path, SCRIPT)
    assert run.wait() == 0
    return run


@pytest.fixture(scope="module")
def own_code(tmp_path_factory) -> Run:
    """A run with a code snapshot. Its script imports a module that pauses the verification."""
    path = tmp_path_factory.mktemp("own_code")
    run_command(["git", "init", "-q", path])
    (path / "pause.py").write_text(PAUSE)
    torch.save([torch.zeros(48, 4), torch.zeros(48)], path / "data.pt")
    run = submit_script(path, f"import pause\n{SCRIPT}", env={"PYTHONDONTWRITEBYTECODE": "1"})
    assert run.wait() == 0
    assert any(run.path.glob("code/**/pause.py"))
    return run


def test_killed_run_is_identical(killed):
    result = assert_identical(killed)
    assert (result["ranks"], result["recorded_ranks"]) == ([2], [2])
    assert result["steps_with_samples_compared"] == 52


@pytest.mark.long
def test_elastic_determinism_is_identical_on_another_number_of_ranks(tmp_path):
    arguments = ["20", "norm=false", "elastic_determinism=true"]
    run = submit_script(tmp_path, SCRIPTS / "train_small.py", *arguments, options=TWO_RANKS)
    assert run.wait() == 0
    result = verify(run, "--ranks", "1")
    assert result["identical"], result
    assert (result["recorded_ranks"], result["ranks"]) == ([2], [1])
    assert result["steps_compared"] == 20
    assert result["notes"] == ["No effect on the result: number of ranks: 2 in the record, 1 here"]


def test_too_many_ranks_for_this_machine_are_refused(killed, tmp_path):
    run = copy_of(killed, tmp_path)
    run.dir.events.write_text(run.dir.events.read_text().replace('"world_size": 2', '"world_size": 640'))
    refused = run.hpctrain("verify", str(run.path), check=False)
    assert refused.returncode == 2
    assert "trained on 640 ranks, which this machine cannot host" in refused.stderr
    assert "--ranks N" in refused.stderr


def test_changed_learning_rate_is_named(own_script):
    script = own_script.path.parent / "train.py"
    script.write_text(script.read_text().replace("lr=0.1", "lr=0.2"))
    result = verify(own_script)
    assert result["first_difference"] == 2  # the first step with other weights
    assert result["causes"][0].startswith("code: train.py has changed")
    names = [difference["name"] for difference in result["state"]["differences"]]
    assert "optimizers/0/param_groups/0/lr" in names


def test_damaged_start_is_reported_without_training(killed, tmp_path):
    run = copy_of(killed, tmp_path)
    file = next(run.dir.checkpoint(48).glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    result = verify(run, "--steps", "49:52")
    assert result["steps_compared"] == 0
    assert "the manifest records" in result["damaged"][0]
    assert "checkpoint of step 48 is damaged" in result["causes"][0]


@pytest.mark.long
def test_killed_loop_with_the_checkpointer_is_identical(tmp_path):
    run, _ = train(tmp_path, "train_with_blocks.py", disturb="kill:9", num_ranks=2)
    assert_identical(run)


@pytest.mark.long
def test_signal_cancels_the_training_and_leaves_nothing(own_code, tmp_path):
    before = contents(own_code.path)
    scratch, paused = tmp_path / "scratch", tmp_path / "paused"
    scratch.mkdir()
    command = [sys.executable, "-m", "hpctrain", "verify", own_code.path, "--scratch-dir", scratch]
    env = environment({"PAUSED": str(paused), "PYTHONDONTWRITEBYTECODE": ""})
    with subprocess.Popen(command, env=env, start_new_session=True) as process:
        try:
            wait_for(paused.exists, 60, "the import of pause.py")
            (folder,) = scratch.iterdir()
            process.send_signal(signal.SIGHUP)
            assert process.wait(120) == 128 + signal.SIGHUP
        finally:
            process.kill()
    assert list(scratch.iterdir()) == []
    assert_no_process_left(folder)
    assert contents(own_code.path) == before


@pytest.mark.long
def test_cancelled_and_resized_run_is_identical(tmp_path):
    """Each part is trained on its own number of ranks, because dropout depends on it."""
    run = submit(tmp_path / "run", {}, TWO_RANKS, step_s=0.1)
    run.wait_for_step(14)
    run.hpctrain("cancel", str(run.path))
    run.wait_for_state("CANCELLED")
    three = ["--backend", "local", "--ntasks-per-node", "3"]
    submit(run.path, {}, three, step_s=0.0)
    assert run.wait() == 0
    result = assert_identical(run)
    assert result["ranks"] == [2, 3]


@pytest.mark.long
def test_run_is_verified_in_a_job_of_slurm(slurm, tmp_path):
    run = submit(tmp_path / "run", slurm.env, ["--nodes", "2", "--ntasks-per-node", "1"], step_s=0.0)
    assert run.wait() == 0
    result = verify(run, "--backend", "slurm", "--steps", "45:", env=slurm.env)
    assert result["identical"], result
    assert (result["first_step"], result["ranks"]) == (43, [2])
    # On a node of an allocation, the ranks run on this node.
    command = [sys.executable, "-m", "hpctrain", "verify", str(run.path), "--steps", "49:", "--json"]
    done = run_command(["srun", "--nodes=1", "--ntasks=1", *command], slurm.env, timeout=200)
    assert json.loads(done.stdout)["identical"]
