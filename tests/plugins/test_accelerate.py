"""An Accelerate loop with hpctrain's checkpointer ends with the parameters of an undisturbed run."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from helpers.disturbed_runs import assert_resumed, assert_same_bits, train

from hpctrain.errors import UserError

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return train(tmp_path_factory.mktemp("undisturbed"), "train_with_accelerate.py")


@pytest.mark.long
@pytest.mark.parametrize("disturb", ["requeue:9", "kill:11"])
def test_disturbed_loop_is_bitwise_identical(disturb, undisturbed, tmp_path):
    run, result = train(tmp_path, "train_with_accelerate.py", disturb=disturb)
    assert_resumed(run, disturb, batches_per_step=2)
    assert_same_bits(result, undisturbed[1])
    # Optimizer steps, as counted by the step hook.
    assert [event["step"] for event in run.events("checkpoint")][-1] == run.status()["step"] == 12


def test_unrestorable_order_is_refused():
    from accelerate import Accelerator

    from hpctrain.accelerate import AcceleratorCheckpointer

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(8), shuffle=True))
    checkpointer = AcceleratorCheckpointer.__new__(AcceleratorCheckpointer)
    with pytest.raises(UserError, match="use_seedable_sampler=True"):
        next(checkpointer.batches(loader, 0))
