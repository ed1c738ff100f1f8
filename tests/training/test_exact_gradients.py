"""The gradient is the mean over the global batch, on any ranks, in any micro-batches, through any stops."""

from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.fork_server import run_forked
from test_trainer import run_script, variables
from train_in_float64 import NUM_SAMPLES, Exact, samples

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.training.data.sample_order import SampleOrder

pytestmark = pytest.mark.ranks

SCRIPT = SCRIPTS / "train_in_float64.py"


def train(run: Path, *args: object, ranks: int = 1) -> list[float]:
    """Return the final parameters, which must be equal on all ranks."""
    all_parameters = run_script(SCRIPT, run, *args, ranks=ranks)
    assert len(all_parameters) == ranks
    assert all(parameters == all_parameters[0] for parameters in all_parameters)
    return all_parameters[0]


def train_manually(num_steps: int, batch: int) -> list[float]:
    """Return the parameters from a loop without hpctrain, on one process, with whole batches."""
    module = Exact()
    optimizer, scheduler = module.configure_optimizers()
    x, y = samples()
    batches = [
        SampleOrder(NUM_SAMPLES, 3).indices(epoch, start, min(start + batch, NUM_SAMPLES))
        for epoch in range(num_steps)
        for start in range(0, NUM_SAMPLES, batch)
    ]
    for indices in batches[:num_steps]:
        module.training_step((x[indices], y[indices]), 0)["loss"].backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in module.parameters()]).tolist()


@pytest.mark.parametrize(
    ("ranks", "batch", "micro"),
    [
        (1, 10, "null"),  # the epoch's last batch has 3 samples
        (1, 10, "4"),  # micro-batches of 4, 3, 3
        (3, 10, "2"),  # shares of 4, 3, 3; the last batch gives each rank one
        (4, 3, "1"),  # more ranks than samples
    ],
)
def test_parameters_match_a_manual_loop(tmp_path, ranks, batch, micro):
    assert train(tmp_path, 7, batch, f"micro_batch_size={micro}", ranks=ranks) == pytest.approx(
        train_manually(7, batch), rel=1e-9, abs=1e-12
    )


def trained_samples(run: Path) -> dict[int, list[object]]:
    """Return the samples of each step on all ranks, in its last attempt."""
    samples_by_step: dict[int, dict[int, list[object]]] = {}
    for path in sorted((run / "samples").iterdir()):
        attempt = int(path.name.split("-")[1])
        for line in read_json_lines(path):
            samples_by_step.setdefault(line["step"], {}).setdefault(attempt, []).extend(line["indices"])
    return {step: sorted(by_attempt[max(by_attempt)]) for step, by_attempt in samples_by_step.items()}


def learning_rates(run: Path) -> list[tuple[int, int, float]]:
    """Return the learning rate of each step, with the epoch."""
    return [(line["step"], line["epoch"], line["lr"]) for line in read_json_lines(RunDir(run).metrics)]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param("tensors", marks=pytest.mark.long),
        "shards",
        pytest.param("stream", marks=pytest.mark.long),
    ],
)
def test_other_ranks_and_workers_resume_with_equal_samples_and_parameters(tmp_path, data):
    uninterrupted = train(tmp_path / "whole", 11, 5, f"data={data}")
    for last_step, ranks, workers in [(2, 4, 0), (4, 2, 1), (7, 3, 0), (11, 4, 2)]:
        resumed = train(
            tmp_path / "parts", last_step, 5, f"data={data}", f"num_workers={workers}", ranks=ranks
        )
    assert resumed == pytest.approx(uninterrupted, rel=1e-9, abs=1e-12)
    assert trained_samples(tmp_path / "parts") == trained_samples(tmp_path / "whole")
    assert learning_rates(tmp_path / "parts") == learning_rates(tmp_path / "whole")


def test_float16_scale_is_resumed(tmp_path):
    args = ('precision="16-mixed"', "overflow_at=0")
    uninterrupted = train(tmp_path / "whole", 8, 6, *args)
    for last_step in (6, 8):
        resumed = train(tmp_path / "parts", last_step, 6, *args)
    assert resumed == uninterrupted


def test_datasets_of_different_lengths_are_refused_before_training(tmp_path):
    """Different sample orders would repeat some samples and lose others."""
    args = ["3", "5", "data=older copy on rank 1"]
    with pytest.raises(AssertionError, match=r"UserError: .*'num_samples': 23.* on rank 0.*22.* on rank 1"):
        run_forked(SCRIPT, args, variables(tmp_path), ranks=2)
