"""Saves of a training: overlap, failures, stops and leftovers."""

from __future__ import annotations

import random
import threading
import time

import numpy
import pytest
import torch
from helpers.waiting import wait_for
from test_training_checkpoints import Line, events, fit, steps

from hpctrain.training.base import rng


def test_random_state_has_a_constant_shape():
    """Otherwise, the layout of a checkpoint would change with every save."""
    shapes = set()
    for seed in range(5):
        rng.seed_all(seed * 10**5)
        for _ in range(seed):
            random.gauss(0, 1)
            numpy.random.standard_normal()
        shapes.add(str({name: (part.shape, part.dtype) for name, part in rng.capture_rng_state().items()}))
    assert len(shapes) == 1


@pytest.mark.parametrize("draws", [0, 1, 2, 1000])
def test_random_state_is_restored_exactly(draws):
    def draw() -> tuple[object, ...]:
        return (
            [random.gauss(0, 1) for _ in range(3)],
            numpy.random.standard_normal(3).tolist(),
            torch.randn(3).tolist(),
            random.random(),
        )

    rng.seed_all(7)
    for _ in range(draws):
        random.gauss(0, 1)
        numpy.random.standard_normal()
    state = rng.capture_rng_state()
    expected = draw()
    rng.seed_all(8)
    rng.restore_rng_state(state)
    assert draw() == expected


@pytest.mark.slow
def test_hanging_disk_does_not_block_the_training(tmp_path, monkeypatch, capsys):
    """The disk recovers only after ten more steps; if training waited, neither would continue."""
    from hpctrain.checkpoint.io.checkpoint_dir import CheckpointDir
    from hpctrain.training.saving import checkpoint_manager

    monkeypatch.setattr(checkpoint_manager, "_MAX_WAIT_S", 0.3)
    released, commit = threading.Event(), CheckpointDir.commit

    def hang(directory, path, step, files):
        assert step != 4 or released.wait(120)
        return commit(directory, path, step, files)

    def release():
        released.set()
        wait_for(lambda: 4 in steps(tmp_path), 10, "the checkpoint for which the disk hung")
        time.sleep(0.5)  # the writer ends shortly after its checkpoint is visible

    monkeypatch.setattr(CheckpointDir, "commit", hang)
    fit(tmp_path, 20, Line(at={2: lambda: time.sleep(0.2), 14: release}), keep_last=20)
    (failure,) = events(tmp_path, "failure")
    assert failure["cause"].startswith("The checkpoint of step 4 is still being written after ")
    assert failure["cause"].endswith("the state after step 6 is not saved.")
    assert "Training continues" in capsys.readouterr().out
    assert not {6, 8, 10, 12} & set(steps(tmp_path))
    assert {2, 4, 16, 18, 20} <= set(steps(tmp_path))


@pytest.mark.slow
def test_step_validated_after_a_stop_counts_among_the_best(tmp_path):
    """An undisturbed run validates and saves at step 4; this one was stopped there, and validates later."""
    import signal

    settings = {
        "validate_every": 4,
        "keep_best": 1,
        "monitor": "val_up",
        "keep_last": 1,
        "checkpoint_every": 100,
    }
    fit(tmp_path / "whole", 12, **settings)
    module = Line(at={3: lambda: signal.raise_signal(signal.SIGTERM)})
    with pytest.raises(SystemExit):
        fit(tmp_path / "parts", 12, module, **settings)
    assert steps(tmp_path / "parts") == [4], "stopped where validation was due"
    fit(tmp_path / "parts", 12, **settings)
    assert steps(tmp_path / "parts") == steps(tmp_path / "whole") == [4, 12]
