"""No step waits for the device: nothing of hpctrain's takes a value out of a tensor that may lie on one.

There need not be a GPU for this test. It looks at who asks a tensor for its value, on the CPU, where that
costs nothing: allowed are the lines that do so only after they have asked whether the tensor lies there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from train_regression import Gan, Noisy, Regression, Tokens, samples

import hpctrain
import hpctrain.training.loop.training_loop

#: Whatever gives a value to the host, which has to wait for it then.
TELLING = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__")
OURS = str(Path(hpctrain.__file__).parent)
#: By file and function: what lies on the CPU by then, such as indices and sums that have arrived.
ALLOWED = {
    ("metric_accumulator.py", "_double"),
    ("train_step.py", "_record_norm"),
    ("step_sync.py", "read"),
    ("sample_order.py", "_walk"),
    ("loader_config.py", "<genexpr>"),
}


@pytest.fixture
def asked(monkeypatch) -> set[tuple[str, str]]:
    """File and function of ours that have asked a tensor for its value, in a step."""
    found: set[tuple[str, str]] = set()

    def watched(name: str):
        tell = getattr(torch.Tensor, name)

        def told(self, *args, **kwargs):
            frame = sys._getframe(1)
            if frame.f_code.co_filename.startswith(OURS):
                found.add((Path(frame.f_code.co_filename).name, frame.f_code.co_name))
            return tell(self, *args, **kwargs)

        return told

    steps = hpctrain.training.loop.training_loop.TrainingLoop._steps

    def watched_steps(self):
        with monkeypatch.context() as patch:
            for name in TELLING:
                patch.setattr(torch.Tensor, name, watched(name))
            yield from steps(self)

    monkeypatch.setattr(hpctrain.training.loop.training_loop.TrainingLoop, "_steps", watched_steps)
    return found


class Heard(hpctrain.Callback):
    def on_step_end(self, trainer, module, metrics):
        assert metrics["loss"] > 0


@pytest.mark.parametrize(
    ("module", "settings"),
    [
        (Regression, {}),
        (Regression, {"gradient_clip_norm": 1.0, "gradient_clip_value": 0.5, "micro_batch_size": 2}),
        (Regression, {"lr_reference_batch_size": 5, "warmup_steps": 3, "precision": "bf16-mixed"}),
        (Regression, {"callbacks": [Heard()], "recompute": ["body"]}),
        (Noisy, {"num_workers": 1}),
        (Tokens, {"micro_batch_size": 2}),
        (Gan, {"micro_batch_size": 2}),
    ],
    ids=["plain", "clipped", "warmed-up", "heard", "noisy", "tokens", "gan"],
)
def test_no_step_asks_a_tensor_for_its_value(asked, module, settings):
    hpctrain.Trainer(max_steps=5, global_batch_size=10, checkpoint_every=None, **settings).fit(
        module(), samples()
    )
    assert asked
    assert asked <= ALLOWED


def test_one_that_does_is_found(asked, monkeypatch):
    scalars = hpctrain.training.loop.training_loop.TrainStep._scalars

    def curious(self, output):
        found = scalars(self, output)
        assert found["loss"] < 1e9
        return found

    monkeypatch.setattr(hpctrain.training.loop.training_loop.TrainStep, "_scalars", curious)
    # The file of whoever asks is this one, which counts as ours for once.
    monkeypatch.setattr(sys.modules[__name__], "OURS", str(Path(__file__).parent))
    hpctrain.Trainer(max_steps=2, checkpoint_every=None).fit(Regression(), samples())
    assert ("test_no_waiting.py", "curious") in asked
