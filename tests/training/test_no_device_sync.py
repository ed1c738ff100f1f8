"""No step waits for the device: hpctrain never reads the value of a tensor that may be on one.

This test needs no GPU. It records the callers that read a tensor's value, on the CPU, where that is free:
only those may do so that have checked the tensor's device.
"""

import sys
from pathlib import Path

import pytest
import torch
from train_regression import Gan, Noisy, Regression, Tokens, samples

import hpctrain
import hpctrain.training.loop.training_loop

#: Methods that copy a value to the host, which must wait for it.
SYNCHRONIZING_METHODS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")
OURS = str(Path(hpctrain.__file__).parent)
#: By file and function: values that are on the CPU, such as indices and received sums.
ALLOWED = {
    ("metric_accumulator.py", "_double"),
    ("train_step.py", "_record_norm"),
    ("step_exchange.py", "_read_results"),
    ("sample_order.py", "_walk"),
    ("loader_workers.py", "<genexpr>"),
    ("loader_workers.py", "__init__"),
}


@pytest.fixture
def readers(monkeypatch) -> set[tuple[str, str]]:
    """Files and functions of hpctrain that read a tensor's value during a step."""
    readers_: set[tuple[str, str]] = set()

    def watch(name: str):
        read = getattr(torch.Tensor, name)

        def record_and_read(self, *args, **kwargs):
            frame = sys._getframe(1)
            if frame.f_code.co_filename.startswith(OURS):
                readers_.add((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
            return read(self, *args, **kwargs)

        return record_and_read

    steps = hpctrain.training.loop.training_loop.TrainingLoop._steps

    def watched_steps(self):
        with monkeypatch.context() as patch:
            for name in SYNCHRONIZING_METHODS:
                patch.setattr(torch.Tensor, name, watch(name))
            yield from steps(self)

    monkeypatch.setattr(hpctrain.training.loop.training_loop.TrainingLoop, "_steps", watched_steps)
    return readers_


class ReadMetrics(hpctrain.Callback):
    def on_step_end(self, trainer, module, metrics):
        assert metrics["loss"] > 0


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (Regression, {}),
        (Regression, {"gradient_clip_norm": 1.0, "gradient_clip_value": 0.5, "micro_batch_size": 2}),
        (Regression, {"lr_reference_batch_size": 5, "warmup_steps": 3, "precision": "bf16-mixed"}),
        (Regression, {"callbacks": [ReadMetrics()], "recompute": ["body"]}),
        (Noisy, {"num_workers": 1}),
        (Tokens, {"micro_batch_size": 2}),
        (Gan, {"micro_batch_size": 2}),
    ],
    ids=["plain", "clipped", "warmed-up", "heard", "noisy", "tokens", "gan"],
)
def test_no_step_reads_a_tensor_value(readers, module, settings):
    hpctrain.Trainer(max_steps=5, global_batch_size=10, checkpoint_every=None, **settings).fit(
        module(), samples()
    )
    assert readers
    assert readers <= ALLOWED
