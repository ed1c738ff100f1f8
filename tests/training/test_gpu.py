"""The Trainer on a CUDA device."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_trainer import losses, train

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
