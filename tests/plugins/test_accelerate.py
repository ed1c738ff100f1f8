"""An Accelerate loop with hpctrain's checkpointer ends with the parameters of an undisturbed run."""

from importlib.util import find_spec

import pytest
import torch
from helpers.disturbed_runs import assert_resumed, assert_same_bits, train
from helpers.ranks import on_ranks, run_on_ranks
from torch import nn

from hpctrain.errors import UserError
from hpctrain.rundir import RUN_DIR_VARIABLE

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.timeout(400),
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


@on_ranks()
def test_unrestorable_order_is_refused():
    from accelerate import Accelerator, DataLoaderConfiguration

    from hpctrain.accelerate import AcceleratorCheckpointer

    checkpointer = AcceleratorCheckpointer.__new__(AcceleratorCheckpointer)
    loader = torch.utils.data.DataLoader(range(8), shuffle=True)
    with pytest.raises(UserError, match="use_seedable_sampler=True"):
        next(checkpointer.batches(Accelerator(cpu=True).prepare(loader), 0))
    config = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
    with pytest.raises(UserError, match="Remove this setting"):
        next(checkpointer.batches(loader, 0))


def train_with_schedule(lr: float, sets_rate: bool) -> None:
    """Train and save one step."""
    from accelerate import Accelerator
    from torch.optim.swa_utils import AveragedModel

    from hpctrain.accelerate import AcceleratorCheckpointer

    accelerator = Accelerator(cpu=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ema = AveragedModel(model)
    prepared = (model, optimizer) if sets_rate else (model, optimizer, schedule)
    accelerator.prepare(*prepared)
    if sets_rate:
        del schedule
    checkpointer = AcceleratorCheckpointer(accelerator)
    step = checkpointer.load()
    if sets_rate:
        optimizer.param_groups[0]["lr"] = lr / (step + 2)
    checkpointer.save(step + 1)
    del ema


def test_differences_of_a_resumed_run_are_reported(tmp_path):
    def output_of(folder: str, lr: float, *, sets_rate: bool = False) -> str:
        options = {"env": {RUN_DIR_VARIABLE: str(tmp_path / folder)}, "returns_output": True}
        return run_on_ranks(train_with_schedule, lr, sets_rate, world_size=1, group=False, **options)[0]

    first = output_of("scheduled", 0.1)
    assert "so a resumed run starts them anew: ema (AveragedModel). " in first
    assert "remains" not in first
    second = output_of("scheduled", 0.5)
    assert "lr remains 0.1, the value in the checkpoint, although the script now sets 0.5." in second
    for _ in range(3):
        assert "remains" not in output_of("manual", 0.1, sets_rate=True)
