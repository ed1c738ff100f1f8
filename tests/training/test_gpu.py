"""The Trainer on a CUDA device."""

from pathlib import Path

import pytest
import torch
from helpers.ranks import run_on_ranks
from test_elastic_determinism import train as train_elastic
from test_trainer import losses, train
from train_regression import Regression, samples

import hpctrain

pytestmark = [pytest.mark.gpu, pytest.mark.ranks]


def test_resumed_run_is_bitwise_the_undisturbed_one(tmp_path: Path, monkeypatch):
    # The test session hides GPUs from the processes that it starts.
    monkeypatch.setattr("test_trainer.VISIBLE_GPUS", "0")
    train(tmp_path / "whole", "12")
    for last_step in ("5", "12"):
        train(tmp_path / "parts", last_step)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


def test_losses_on_gpu_match_those_on_cpu(tmp_path: Path, monkeypatch):
    train(tmp_path / "cpu", "6")
    monkeypatch.setattr("test_trainer.VISIBLE_GPUS", "0")
    train(tmp_path / "gpu", "6")
    assert list(losses(tmp_path / "gpu").values()) == pytest.approx(
        list(losses(tmp_path / "cpu").values()), rel=1e-4
    )
    assert losses(tmp_path / "gpu") != losses(tmp_path / "cpu")


def train_elastic_on_gpu(run: str) -> dict[str, torch.Tensor]:
    state = train_elastic(run, 12, {})
    assert {value.device.type for value in state.values()} == {"cuda"}
    return {name: value.cpu() for name, value in state.items()}


def test_number_of_ranks_that_share_a_gpu_does_not_change_a_bit(tmp_path: Path):
    env = {"CUDA_VISIBLE_DEVICES": "0", "HPCTRAIN_SHARE_GPUS": "1"}
    one, *others = (
        run_on_ranks(train_elastic_on_gpu, str(tmp_path / str(size)), world_size=size, env=env)[0]
        for size in (1, 2, 4)
    )
    for other in others:
        assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert losses(tmp_path / "4") == losses(tmp_path / "1")


class Wide(Regression):
    def training_step(self, batch, batch_idx):
        memory = torch.cuda.get_device_properties(0).total_memory
        held = torch.empty(memory // 10 * len(batch[0]), dtype=torch.uint8, device="cuda")
        return super().training_step(batch, batch_idx) + 0 * held[:1].sum()


def test_out_of_memory_error_has_a_hint():
    with pytest.raises(torch.OutOfMemoryError) as caught:
        hpctrain.Trainer(max_steps=1, global_batch_size=20).fit(Wide(), samples())
    assert "Set a smaller micro_batch_size" in "".join(caught.value.__notes__)
