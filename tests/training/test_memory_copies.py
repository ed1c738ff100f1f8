"""Copies of the state in memory, by ranks on separate nodes, whose memory is a folder of each rank."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_on_ranks
from helpers.waiting import wait_for
from torch import nn

import hpctrain
from hpctrain.checkpoint.interval import CopyInterval
from hpctrain.checkpoint.tier import memory_copies
from hpctrain.errors import DiskFull
from hpctrain.files import read_json_lines
from hpctrain.rundir import ATTEMPT_VARIABLE, RunDir
from hpctrain.training.saving import state_copies

LAST_STEP, FAILED_STEP, MAX_REPEATED = 12, 9, 2


class Net(hpctrain.Module):
    def __init__(self, failed_step: int | None, checkpoint: Path) -> None:
        super().__init__()
        self.failed_step, self.step, self.checkpoint = failed_step, 0, checkpoint
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()
        self.step += 1
        if self.step == self.failed_step:
            wait_for(self.checkpoint.exists, 30, "the checkpoint in the run folder")
            raise RuntimeError("Connection closed by peer")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(
    folder: Path, strategy: str, attempt: int, failed_step: int | None = None, algorithm: str = "allreduce"
) -> None:
    """Train as a rank of its own node."""
    rank = os.environ["RANK"]
    memory = folder / f"memory-{rank}"
    memory.mkdir(parents=True, exist_ok=True)
    state_copies._SHARED_MEMORY = memory
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank}
    node["GROUP_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    os.environ |= {**node, ATTEMPT_VARIABLE: str(attempt)}
    trainer = hpctrain.Trainer(
        max_steps=LAST_STEP,
        global_batch_size=8,
        checkpoint_every=5,
        seed=4,
        strategy=strategy,
        algorithm=algorithm,
        run_dir=folder / "run",
        gradient_clip_norm=1.0,
        memory_copies=MAX_REPEATED,
    )
    checkpoint = folder / "run" / "checkpoints" / "step-00000005"
    trainer.fit(Net(failed_step, checkpoint), torch.randn(96, 3, generator=torch.Generator().manual_seed(2)))


def fail(folder: Path, strategy: str) -> None:
    with pytest.raises(RuntimeError, match="closed by peer"):
        train(folder, strategy, 0, FAILED_STEP)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(name, marks=pytest.mark.extended) for name in ("zero1", "fsdp")),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("zero2", "zero3")),
    ],
)
def test_lost_nodes(tmp_path, strategy):
    """One lost node costs few steps; without both replicas of a part, the checkpoint is loaded."""
    undisturbed, run = tmp_path / "undisturbed", RunDir(tmp_path / "failed" / "run")
    run_on_ranks(train, undisturbed, strategy, 0)
    for lost in ([], [1], [0, 1]):
        shutil.rmtree(tmp_path / "failed", ignore_errors=True)
        run_on_ranks(fail, tmp_path / "failed", strategy)
        for rank in lost:
            shutil.rmtree(tmp_path / "failed" / f"memory-{rank}")
        run_on_ranks(train, tmp_path / "failed", strategy, 1)
        (resumed,) = (event["step"] for event in read_json_lines(run.events) if event["kind"] == "resumed")
        if len(lost) < 2:
            assert FAILED_STEP - 1 - resumed <= MAX_REPEATED, lost
        else:
            assert resumed == 5
        assert losses(run) == losses(RunDir(undisturbed / "run")), lost
        copied = next(event for event in read_json_lines(run.events) if "memory_bytes" in event)
        assert copied["memory_bytes"] == 4 * copied["sent_bytes"] > 0
        assert not list((tmp_path / "failed").glob("memory-*/*"))


@pytest.mark.ranks
def test_new_run_in_the_folder_of_a_deleted_one_ignores_its_copies(tmp_path):
    run = RunDir(tmp_path / "run")
    run_on_ranks(fail, tmp_path, "zero1")
    assert list(tmp_path.glob("memory-*/*/*.json"))
    shutil.rmtree(run.path)
    run_on_ranks(train, tmp_path, "zero1", 0)
    assert not [event for event in read_json_lines(run.events) if event["kind"] == "resumed"]
    assert min(losses(run)) == 1


@pytest.mark.ranks
def test_remaining_node_copies_all_parts_to_the_run_folder(tmp_path):
    run = RunDir(tmp_path / "run")
    run_on_ranks(fail, tmp_path, "zero1")
    shutil.rmtree(tmp_path / "memory-1")
    run_on_ranks(train, tmp_path, "zero1", 1, world_size=1)
    (resumed,) = (event["step"] for event in read_json_lines(run.events) if event["kind"] == "resumed")
    assert FAILED_STEP - 1 - resumed <= MAX_REPEATED
    assert (run.checkpoint(resumed)).is_dir()


def resume_on_full_disk(folder: Path) -> None:
    def fail_to_write(*_):
        raise DiskFull("the copy was not written: No space left on device")

    memory_copies.write_and_commit = fail_to_write
    train(folder, "zero1", 1)


@pytest.mark.ranks
def test_run_resumes_from_a_checkpoint_if_the_copy_does_not_fit_on_the_disk(tmp_path):
    run = RunDir(tmp_path / "run")
    run_on_ranks(fail, tmp_path, "zero1")
    run_on_ranks(resume_on_full_disk, tmp_path)
    (resumed,) = (event for event in read_json_lines(run.events) if event["kind"] == "resumed")
    assert resumed["step"] == 5
    assert "No space left on device. The newest checkpoint is used instead." in resumed["broken"][0]


@pytest.mark.ranks
def test_replicas_that_differ_are_not_copied(tmp_path):
    """A copy would synchronize the replicas, and thus change the result."""
    run_on_ranks(train, tmp_path, "ddp", 0, None, "local_sgd")
    kinds = [event["kind"] for event in read_json_lines(RunDir(tmp_path / "run").events)]
    assert "checkpoint" in kinds
    assert "memory_copy" not in kinds


def losses(run: RunDir) -> dict[int, tuple[float, float]]:
    """Return the loss and the norm of each step, the later ones if it was trained twice."""
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in read_json_lines(run.metrics)}


def test_interval_by_cost():
    interval = CopyInterval(None)
    for _ in range(2):
        interval.on_copied(1.0, 0.1)  # allocates memory
    assert interval.wanted == 1
    interval.on_copied(0.001, 0.1)
    assert interval.wanted == 1
    for _ in range(3):
        interval.on_copied(0.1, 0.1)
    assert (interval.wanted, interval.every) == (50, 1)
