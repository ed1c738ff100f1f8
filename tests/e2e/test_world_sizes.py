"""Stop and resume in real processes, on the same and on other numbers of ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.fork_server import run_forked

from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir

SCRIPT = SCRIPTS / "stop_and_resume.py"
LAST_STEP, BATCH, SAMPLES = 30, 16, 203
STEPS_PER_EPOCH = -(-SAMPLES // BATCH)


def train(run: Path, ranks: int, *stop: int, last_step: int = LAST_STEP) -> dict[str, torch.Tensor] | None:
    """Run to the end, or until rank `stop[1]` receives a stop signal in step `stop[0]` of this process."""
    env = {"HPCTRAIN_RUN_DIR": str(run), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    out = run.with_suffix(".pt")
    output = run_forked(SCRIPT, [str(out), str(last_step), *map(str, stop)], env, ranks=ranks)
    if stop:
        assert "stopped" in output
        return None
    weights: dict[str, torch.Tensor] = torch.load(out, weights_only=True)
    return weights


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run of four ranks, and its weights."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    weights = train(run, 4)
    assert weights is not None
    return run, weights


def losses(run: Path) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in read_json_lines(RunDir(run).metrics)}


def trained_samples(run: Path) -> list[tuple[int, Counter[int]]]:
    """Return the samples of each step, with counts, from the attempt that trained it last."""
    steps: dict[int, dict[int, Counter[int]]] = {}
    for path in sorted((run / "samples").iterdir()):
        attempt = int(path.name.split("-")[1])
        for record in read_json_lines(path):
            steps.setdefault(record["step"], {}).setdefault(attempt, Counter()).update(record["indices"])
    return [(step, attempts[max(attempts)]) for step, attempts in sorted(steps.items())]


def relative_distance(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    return max(float((first[name] - second[name]).norm() / second[name].norm()) for name in second)


def test_run_on_4_2_3_4_ranks_equals_the_undisturbed_one(undisturbed, tmp_path):
    run = tmp_path / "run"
    for ranks, stop in ((4, (8, 2)), (2, (7, 0)), (3, (6, 1))):
        train(run, ranks, *stop)
    weights = train(run, 4)
    assert relative_distance(weights, undisturbed[1]) <= 1e-6
    resumed = [event for event in RunDir(run).read_events() if event["kind"] == "resumed"]
    stopped = [event for event in RunDir(run).read_events() if event["kind"] == "signal"]
    assert [event["step"] for event in resumed] == [event["step"] for event in stopped]
    assert all(event["saved"] for event in stopped)
    assert len(stopped) == 3
    assert trained_samples(run) == trained_samples(undisturbed[0])
    whole_epochs = trained_samples(run)[: 2 * STEPS_PER_EPOCH]
    assert set(sum((samples for _, samples in whole_epochs), Counter()).values()) == {2}


@pytest.mark.long
def test_same_number_of_ranks_is_bitwise_equal(undisturbed, tmp_path):
    run = tmp_path / "run"
    for stop in ((5, 3), (9, 0)):
        train(run, 4, *stop)
    weights = train(run, 4)
    for name, value in undisturbed[1].items():
        assert torch.equal(weights[name], value), name
    assert losses(run) == losses(undisturbed[0])


@pytest.mark.long
@pytest.mark.timeout(600)
def test_any_two_world_sizes_in_turn(undisturbed, tmp_path):
    for before, after in itertools.product((1, 2, 3, 5, 8), repeat=2):
        run = tmp_path / f"{before}-{after}"
        train(run, before, 11, before - 1)
        weights = train(run, after)
        assert relative_distance(weights, undisturbed[1]) <= 1e-6, (before, after)
        assert trained_samples(run) == trained_samples(undisturbed[0]), (before, after)
