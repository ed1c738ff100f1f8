"""Automatic micro-batch size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import hpctrain
from hpctrain.training.base import rng
from hpctrain.training.optim.micro_batch_size import fits_in_memory, largest_that_fits, preserve_state


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_largest_fitting_micro_batch_is_found_in_few_trials(share, limit):
    trials: list[int] = []

    def fits(count: int) -> bool:
        trials.append(count)
        return count <= limit

    size = largest_that_fits(share, fits)
    parts = -(-share // size)
    assert size <= limit
    assert parts == 1 or -(-share // (parts - 1)) > limit
    assert len(trials) <= 2 * share.bit_length() + 1


def test_trial_restores_gradients_buffers_and_random_generators():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before, generators = {k: v.clone() for k, v in module.state_dict().items()}, rng.capture_rng_state()

    def forward_backward() -> None:
        module(torch.rand(5, 3)).sum().backward()

    with preserve_state(module):
        assert fits_in_memory(module, torch.device("cpu"), forward_backward)
        assert not torch.equal(module.state_dict()["1.running_mean"], before["1.running_mean"])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(torch.equal(value, generators[name]) for name, value in rng.capture_rng_state().items())


class Wide(hpctrain.Module):
    """Needs memory in proportion to the batch size, and records it."""

    def __init__(self, bytes_a_sample: int = 0) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, affine=False, momentum=None)
        self.bytes_a_sample, self.seen = bytes_a_sample, list[int]()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.seen.append(len(batch))
        held = torch.empty(self.bytes_a_sample * len(batch), dtype=torch.uint8, device=batch.device)
        return self.layer(self.norm(batch)).pow(2).mean() + 0 * held[:1].sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def test_auto_uses_the_whole_share_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    module = Wide()
    trainer = hpctrain.Trainer(max_steps=3, global_batch_size=12, micro_batch_size="auto")
    trainer.fit(module, torch.rand(30, 4))
    assert module.seen == [12, 12, 6]


@pytest.mark.gpu
def test_auto_finds_a_size_on_a_gpu_and_keeps_it_after_a_stop(tmp_path):
    memory = torch.cuda.get_device_properties(0).total_memory
    module = Wide(bytes_a_sample=memory // 10)
    settings = {"global_batch_size": 32, "micro_batch_size": "auto", "run_dir": tmp_path}
    hpctrain.Trainer(max_steps=2, **settings).fit(module, torch.rand(64, 4))
    parts = -(-32 // max(module.seen[-4:]))  # the last four belong to the last step
    trained = module.seen[-2 * parts :]
    assert 5 <= max(trained) <= 9
    assert sum(trained) == 64
    assert int(module.norm.num_batches_tracked) == len(trained)  # without those of the trials
    resumed = Wide(bytes_a_sample=memory // 100)
    hpctrain.Trainer(max_steps=4, **settings).fit(resumed, torch.rand(64, 4))
    assert resumed.seen == trained


@pytest.mark.gpu
def test_out_of_memory_error_has_a_hint():
    memory = torch.cuda.get_device_properties(0).total_memory
    with pytest.raises(torch.OutOfMemoryError) as caught:
        hpctrain.Trainer(max_steps=1, global_batch_size=32).fit(Wide(memory // 10), torch.rand(64, 4))
    assert "or 'auto' for the largest size that fits" in "".join(caught.value.__notes__)


class Sizes(hpctrain.Module):
    """Records the sizes of validation and test batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.sizes = nn.Linear(1, 1), list[int]()

    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.sizes.append(len(batch))
        return batch.mean()

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("as_stream", [False, True])
def test_evaluations_use_micro_batches(as_stream):
    data, module = torch.arange(10.0)[:, None], Sizes()

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(data)

    evaluated = Stream() if as_stream else data
    trainer = hpctrain.Trainer(
        max_steps=1, global_batch_size=8, micro_batch_size=3, validate_every=1, sanity_val_batches=1
    )
    trainer.fit(module, data, evaluated)
    assert module.sizes == [3, 3, 3, 3, 1]
    assert trainer.metrics["val_loss"] == pytest.approx(4.5)
    module.sizes.clear()
    assert trainer.test(module, evaluated)["test_loss"] == pytest.approx(4.5)
    assert len(trainer.predict(module, evaluated)) == 4
    assert module.sizes == [3, 3, 3, 1] * 2
