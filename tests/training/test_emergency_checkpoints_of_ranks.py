"""Emergency checkpoints of ranks on separate nodes, whose memory is a folder of each rank."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_on_ranks
from torch import nn
from torch.nn import functional as F

import hpctrain
from hpctrain.files import read_json_lines, try_lock
from hpctrain.records.lease import LeaseHolder
from hpctrain.rundir import ATTEMPT_VARIABLE, EMERGENCY_CHECKPOINT_VARIABLE, RunDir
from hpctrain.runtime.program.emergency_save import emergency_save
from hpctrain.training.loop.step_exchange import StepExchange
from hpctrain.training.saving import emergency_checkpoints

LAST_STEP, FAILED_STEP = 12, 8

pytestmark = pytest.mark.ranks


class Net(hpctrain.Module):
    """Batch norm, dropout, and an optimizer with a schedule."""

    def __init__(self, failed_step: int | None = None) -> None:
        super().__init__()
        self.failed_step, self.step = failed_step, 0
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self.net(batch), batch.sum(1, keepdim=True))
        self.step += 1
        if self.step == self.failed_step:
            raise RuntimeError("Connection closed by peer")
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, LAST_STEP)


class AveragingNet(Net):
    """Changes a parameter in its training step, without a trace in its version, like many moving averages."""

    def __init__(self, first: int) -> None:
        super().__init__(FAILED_STEP)
        self.first, self.average = first, nn.Parameter(torch.ones(3), requires_grad=False)

    def training_step(self, batch, batch_idx):
        if batch_idx + 1 >= self.first:
            self.average.data.mul_(0.9)
        return super().training_step(batch, batch_idx)


class EndAfter(hpctrain.Callback):
    """Requests the end of the training after a step that is exchanged immediately, because of its save."""

    def on_step_end(self, trainer, module, metrics):
        if trainer.step == 6:
            trainer.end()


def train(
    folder: Path,
    attempt: int,
    failed_step: int | None = None,
    request: str | None = None,
    net: Net | None = None,
    **settings: Any,
) -> Net:
    """Train as a rank of its own node."""
    rank = os.environ["RANK"]
    memory = folder / f"memory-{rank}"
    memory.mkdir(exist_ok=True)
    emergency_checkpoints._SHARED_MEMORY = memory
    os.environ |= {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GROUP_RANK": rank,
        "GROUP_WORLD_SIZE": "2",
        ATTEMPT_VARIABLE: str(attempt),
    }
    if request is not None:
        os.environ[EMERGENCY_CHECKPOINT_VARIABLE] = request
    emergency_save.is_available = True
    net = net or Net(failed_step)
    data = torch.randn(96, 3, generator=torch.Generator().manual_seed(2))
    settings = {"max_steps": LAST_STEP, "global_batch_size": 8, "checkpoint_every": 3, "seed": 4, **settings}
    settings |= {"run_dir": folder / "run", "gradient_clip_norm": 1.0, "emergency_checkpoints": True}
    hpctrain.Trainer(**settings).fit(net, data)
    return net


def train_undisturbed(folder: Path) -> dict[str, torch.Tensor]:
    return train(folder, 0).state_dict()


def fail_and_save(
    folder: Path, saver: int, failed_step: int = FAILED_STEP, **settings: Any
) -> dict[str, object] | None:
    """Fail on all ranks in the same step; one of them saves its state. Return the supervisor's request."""
    with pytest.raises(RuntimeError, match="closed by peer"):
        train(folder, 0, failed_step, **settings)
    rank = int(os.environ["RANK"])
    if rank != saver:
        return None
    answer = emergency_save.handle(rank, {"freeze_state": True})
    assert answer is not None
    saved = emergency_save.handle(rank, {"save_state": rank})
    assert saved is not None
    assert "path" in saved["saved_state"], saved
    state = {name: value for name, value in answer["frozen_state"].items() if name != "folder"}
    return {**state, "world_size": 2}


def resume(folder: Path, request: dict[str, object]) -> tuple[dict[str, torch.Tensor], list[str]]:
    net = train(folder, 1, request=json.dumps(request))
    return net.state_dict(), sorted(map(str, (folder / f"memory-{os.environ['RANK']}").rglob("*")))


@pytest.mark.parametrize("saver", [0, 1])
def test_state_of_one_node_continues_the_training_bit_for_bit(tmp_path, saver):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    expected, _ = run_on_ranks(train_undisturbed, tmp_path / "one")
    request = run_on_ranks(fail_and_save, tmp_path / "two", saver)[saver]
    assert request["step"] == FAILED_STEP - 1
    (result, files), (_, files_1) = run_on_ranks(resume, tmp_path / "two", request)
    for name, tensor in expected.items():
        torch.testing.assert_close(result[name], tensor, rtol=0, atol=0, msg=name)
    one, two = (RunDir(tmp_path / name / "run") for name in ("one", "two"))
    assert [event["step"] for event in two.read_events() if event["kind"] == "resumed"] == [FAILED_STEP - 1]
    assert losses(one) == losses(two)
    assert files == files_1 == []


def losses(run: RunDir) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_json_lines(run.metrics)]


def assert_resumed_from_checkpoint(folder: Path) -> None:
    """The save of step 6 may not be committed at the failure."""
    run = RunDir(folder / "run")
    assert [event["step"] for event in run.read_events() if event["kind"] == "resumed"] in ([3], [6])


def resume_after_loss(folder: Path, request: dict[str, object], *lost: str) -> dict[str, torch.Tensor]:
    """Resume without the lost files."""
    if os.environ["RANK"] == "1":
        for pattern in lost:
            for path in folder.glob(f"memory-*/*/{pattern}"):
                path.unlink()
    return train(folder, 1, request=json.dumps(request)).state_dict()


def test_without_the_record_of_a_rank_the_newest_checkpoint_is_loaded(tmp_path):
    request = run_on_ranks(fail_and_save, tmp_path, 0)[0]
    run_on_ranks(resume_after_loss, tmp_path, request, "record-*-00001", "copy-*-00001")
    assert_resumed_from_checkpoint(tmp_path)


def test_a_lost_node_costs_no_completed_step(tmp_path):
    """The state and the copy of its record come from the other node."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    expected, _ = run_on_ranks(train_undisturbed, tmp_path / "one")
    request = run_on_ranks(fail_and_save, tmp_path / "two", 0)[0]
    shutil.rmtree(tmp_path / "two" / "memory-1")
    for result in run_on_ranks(resume_after_loss, tmp_path / "two", request):
        for name, tensor in expected.items():
            torch.testing.assert_close(result[name], tensor, rtol=0, atol=0, msg=name)
    one, two = (RunDir(tmp_path / name / "run") for name in ("one", "two"))
    assert [event["step"] for event in two.read_events() if event["kind"] == "resumed"] == [FAILED_STEP - 1]
    assert losses(one) == losses(two)


def test_files_in_the_run_folder_continue_the_training_on_other_nodes(tmp_path):
    """They are copied there before a requeue."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    expected, _ = run_on_ranks(train_undisturbed, tmp_path / "one")
    request = run_on_ranks(fail_and_save, tmp_path / "two", 1)[1]
    run = RunDir(tmp_path / "two" / "run")
    for rank in (0, 1):
        (memory,) = (tmp_path / "two" / f"memory-{rank}").iterdir()
        shutil.copytree(memory, run.emergency / f"{rank}", ignore=shutil.ignore_patterns("run"))
        shutil.rmtree(memory)
    (result, files), (_, files_1) = run_on_ranks(resume, tmp_path / "two", request)
    for name, tensor in expected.items():
        torch.testing.assert_close(result[name], tensor, rtol=0, atol=0, msg=name)
    assert [event["step"] for event in run.read_events() if event["kind"] == "resumed"] == [FAILED_STEP - 1]
    assert losses(RunDir(tmp_path / "one" / "run")) == losses(run)
    assert files == files_1 == []
    assert not run.emergency.exists()


def save_in_long_interval(folder: Path) -> dict[str, object] | None:
    return fail_and_save(folder, 0, 90, max_steps=90, log_every=200, checkpoint_every=200)


def resume_in_long_interval(folder: Path, request: dict[str, object]) -> None:
    train(folder, 1, request=json.dumps(request), max_steps=90, log_every=200, checkpoint_every=200)


def test_only_results_that_are_used_are_required(tmp_path):
    """The records do not contain all steps since the last line of metrics."""
    request = run_on_ranks(save_in_long_interval, tmp_path)[0]
    run_on_ranks(resume_in_long_interval, tmp_path, request)
    resumed = [
        event["step"] for event in RunDir(tmp_path / "run").read_events() if event["kind"] == "resumed"
    ]
    assert resumed == [89]


def resume_without_request(folder: Path) -> list[Path]:
    """Return the files of the failed attempt that exist in the first step."""
    found: list[Path] = []

    class Search(Net):
        def training_step(self, batch, batch_idx):
            found.extend((folder / f"memory-{os.environ['RANK']}").rglob("*-000-*"))
            return super().training_step(batch, batch_idx)

    train(folder, 1, net=Search())
    return found


def test_a_state_that_is_not_requested_is_removed_before_the_first_step(tmp_path):
    """It uses memory, such as that which the failed attempt lacked."""
    run_on_ranks(fail_and_save, tmp_path, 0)
    assert run_on_ranks(resume_without_request, tmp_path) == [[], []]


def test_files_of_a_killed_run_are_removed_by_the_next_run_on_the_node(tmp_path):
    names = ("own", "alive", "local", "killed", "ended", "deleted")
    folders = [tmp_path / f"hpctrain-{name}-emergency" for name in names]
    for folder in folders:
        folder.mkdir()
        run = RunDir(tmp_path / f"run-{folder.name}")
        (folder / "run").symlink_to(run.path)
        if "deleted" not in folder.name:
            run.lease(0).parent.mkdir(parents=True)
        if "local" in folder.name or "ended" in folder.name:
            run.lock.touch()
        elif "deleted" not in folder.name:
            run.lease(0).write_bytes(LeaseHolder("7").text())
    lock = try_lock(RunDir(tmp_path / "run-hpctrain-local-emergency").lock)
    assert lock is not None
    os.utime(RunDir(tmp_path / "run-hpctrain-killed-emergency").lease(0), (0, 0))
    emergency_checkpoints._remove_abandoned(tmp_path, RunDir(tmp_path / "run-hpctrain-own-emergency"))
    assert [folder.exists() for folder in folders] == [True, True, True, False, False, False]
    os.close(lock)


def test_two_ranks_can_remove_the_folder_at_the_same_time(tmp_path, monkeypatch):
    folder, scandir = tmp_path / "folder", os.scandir
    folder.mkdir()

    def remove_before_reading(path: str) -> Any:
        os.rmdir(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", remove_before_reading)
    emergency_checkpoints._remove_unused(folder, "record-*")
    assert not folder.exists()


class NanNet(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * float("nan") if batch_idx == 4 else loss


def roll_back(folder: Path) -> list[bool]:
    """Return the answers to requests during the communication about a bad loss."""
    describe, answers = StepExchange._describe, []

    def request_state(*arguments: Any) -> str:
        answer = emergency_save.handle(0, {"freeze_state": True})
        assert answer is not None
        answers.append("step" in answer["frozen_state"])
        emergency_save.handle(0, {"release_state": True})
        return describe(*arguments)

    StepExchange._describe = request_state  # type: ignore[method-assign]
    train(folder, 0, net=NanNet(), on_bad_loss="rollback")
    return answers


def test_the_state_is_not_locked_while_the_ranks_communicate_about_a_bad_loss(tmp_path):
    assert run_on_ranks(roll_back, tmp_path) == [[True], [True]]


def fail_with(folder: Path, net: Net, **settings: Any) -> str:
    """Fail, and return the reason why the state is not usable."""
    with pytest.raises(RuntimeError, match="closed by peer"):
        train(folder, 0, net=net, **settings)
    answer = emergency_save.handle(int(os.environ["RANK"]), {"freeze_state": True})
    assert answer is not None
    return answer["frozen_state"].get("why")


@pytest.mark.parametrize("first", [1, FAILED_STEP])
def test_a_parameter_that_changes_between_updates_makes_the_state_unusable(tmp_path, first):
    why = "the parameters were changed between two optimizer steps"
    assert run_on_ranks(fail_with, tmp_path, AveragingNet(first)) == [why] * 2


def fail_after_request_to_end(folder: Path) -> str:
    return fail_with(folder, Net(FAILED_STEP), callbacks=[EndAfter()])


def test_a_request_to_end_makes_the_state_unusable(tmp_path):
    """The state does not contain it, so the next attempt would not end."""
    why = "a callback requested the end of training"
    assert run_on_ranks(fail_after_request_to_end, tmp_path) == [why] * 2


def resume_with_public_folder(folder: Path, request: dict[str, object]) -> None:
    if os.environ["RANK"] == "1":
        (private,) = (folder / "memory-1").iterdir()
        private.chmod(0o777)
    train(folder, 1, request=json.dumps(request))


def test_a_folder_that_others_can_write_is_not_used(tmp_path):
    request = run_on_ranks(fail_and_save, tmp_path, 0)[0]
    run_on_ranks(resume_with_public_folder, tmp_path, request)
    assert_resumed_from_checkpoint(tmp_path)


def resume_at_end(folder: Path, request: dict[str, object]) -> list[str]:
    train(folder, 1, request=json.dumps(request), max_steps=FAILED_STEP - 1)
    return sorted(map(str, (folder / f"memory-{os.environ['RANK']}").rglob("*")))


def test_a_state_of_the_last_step_leaves_no_files(tmp_path):
    request = run_on_ranks(fail_and_save, tmp_path, 0)[0]
    assert run_on_ranks(resume_at_end, tmp_path, request) == [[], []]
