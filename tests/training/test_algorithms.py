"""Communication algorithms of ddp: bytes sent, learning, and resuming after a stop."""

import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from helpers import REPOSITORY
from helpers.ranks import run_on_ranks
from test_trainer import variables
from torch import nn
from torch.utils.data import Dataset

import hpctrain
from hpctrain.training.algorithms import Algorithm, find_algorithm, register_algorithm
from hpctrain.training.algorithms.compression import PowerSGD, QAdam, QuantizedRows
from hpctrain.training.algorithms.weight_averaging import LocalSGD, tournament_peer
from hpctrain.training.data.batch_plan import split_range
from hpctrain.training.data.sample_order import SampleOrder

pytestmark = pytest.mark.ranks

NUM_WEIGHTS = 64 * 128 + 128 + 128 * 10 + 10
CONFIGURED = {
    "local_sgd": LocalSGD,
    "local_sgd, every 8": partial(LocalSGD, 8),
    "powersgd": PowerSGD,
    "qadam": partial(QAdam, 40),
}
STEPS = 120


class Digits(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"accuracy": (self.net(x).argmax(1) == y).double().mean()}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the handwritten digits of scikit-learn, whose import takes seconds."""
    package = find_spec("sklearn").submodule_search_locations[0]
    digits = numpy.loadtxt(Path(package, "datasets/data/digits.csv.gz"), delimiter=",")
    return torch.tensor(digits[:, :64], dtype=torch.float32) / 16, torch.tensor(digits[:, 64]).long()


def small_gpt(num_steps: int) -> tuple[hpctrain.Module, Dataset, Dataset]:
    """Return the example, which gets from 5.5 to 2.9 nats per byte on 200,000 bytes in 200 steps."""
    sys.path.append(str(REPOSITORY / "examples"))
    from gpt import GPT, Windows, standard_library

    text = standard_library(200_000)
    module = GPT(32, width=32, depth=1, heads=2, max_steps=num_steps, lr=4e-3)
    return module, Windows(text[8_000:], 32), Windows(text[:8_000], 32)


def train_rank(name: str, last_step: int, checkpoint_every: int | None, is_gpt: bool) -> dict[str, Any]:
    algorithm = CONFIGURED[name]() if name in CONFIGURED else find_algorithm(name)
    settings = {"max_steps": last_step, "algorithm": algorithm, "checkpoint_every": checkpoint_every}
    trainer = hpctrain.Trainer(global_batch_size=64, seed=1, validate_every=10**6, **settings)
    x, y = samples()
    module, *data = small_gpt(last_step) if is_gpt else (Digits(), (x[:1400], y[:1400]), (x[1400:], y[1400:]))
    trainer.fit(module, *data)
    weights = nn.utils.parameters_to_vector(module.parameters()).tolist()
    return {**trainer.metrics, "weights": weights, "sent_bytes": algorithm.sent_bytes}


def train(
    run: Path,
    algorithm: str,
    last_step: int,
    *,
    checkpoint_every: int | None = None,
    ranks: int = 2,
    is_gpt: bool = False,
) -> dict[str, Any]:
    """Return the result of rank 0; all ranks must end with bitwise equal weights."""
    arguments = (algorithm, last_step, checkpoint_every, is_gpt)
    results = run_on_ranks(train_rank, *arguments, world_size=ranks, env=variables(run), group=False)
    assert all(result["weights"] == results[0]["weights"] for result in results)
    return results[0]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> dict:
    return train(tmp_path_factory.mktemp("plain"), "allreduce", STEPS)


def _long(*values: str) -> list[Any]:
    """Mark further cases of the same kind as long."""
    return [pytest.param(value, marks=pytest.mark.long) for value in values]


@pytest.mark.extended
@pytest.mark.parametrize(
    ("algorithm", "ranks", "low", "high"),
    [
        pytest.param("fp16", 2, 0.5, 0.5, marks=pytest.mark.long),
        pytest.param("bf16", 2, 0.5, 0.5, marks=pytest.mark.long),
        ("powersgd", 2, 0.07, 0.1),
        pytest.param("bytegrad", 2, 0.375, 0.38, marks=pytest.mark.long),
        # A third of the steps are its warm-up.
        pytest.param("qadam", 2, 0.58, 0.6, marks=pytest.mark.long),
        pytest.param("decentralized", 2, 1.0, 1.05, marks=pytest.mark.long),
        pytest.param("decentralized", 4, 1.0, 1.05, marks=pytest.mark.long),
        # To two neighbours.
        pytest.param("low_precision_decentralized", 3, 0.5, 0.55, marks=pytest.mark.long),
        pytest.param("async", 2, 0.005, 1.1, marks=pytest.mark.long),
        pytest.param("local_sgd", 2, 0.25, 0.3, marks=pytest.mark.long),
        pytest.param("local_sgd, every 8", 2, 0.125, 0.17, marks=pytest.mark.long),
    ],
)
def test_fewer_bytes_are_sent_with_equal_accuracy(tmp_path, plain, algorithm, ranks, low, high):
    """Bytes per step, relative to float32 gradients; final synchronizations add a few."""
    result = train(tmp_path, algorithm, STEPS, ranks=ranks)
    assert low <= result["sent_bytes"] / STEPS / (4 * NUM_WEIGHTS) <= high
    assert plain["accuracy"] > 0.85
    assert result["accuracy"] == pytest.approx(plain["accuracy"], abs=0.03)


@pytest.fixture(scope="module")
def plain_gpt(tmp_path_factory) -> float:
    return train(tmp_path_factory.mktemp("gpt"), "allreduce", 200, is_gpt=True)["val_loss"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("algorithm", "ranks"),
    [
        *[(name, 2) for name in ("fp16", "bf16", "powersgd", "bytegrad", "qadam")],
        *[("decentralized", 2), ("low_precision_decentralized", 3), ("async", 2), ("local_sgd", 2)],
    ],
)
def test_small_gpt_learns_equally(tmp_path, plain_gpt, algorithm, ranks):
    """Nats per byte on validation text; an untrained model has 5.5."""
    assert plain_gpt < 3.0
    result = train(tmp_path, algorithm, 200, ranks=ranks, is_gpt=True)
    assert result["val_loss"] == pytest.approx(plain_gpt, abs=0.2)


def test_first_step_differs_only_by_rounding(tmp_path):
    """AdamW's first step depends on the sign of a gradient; only signs next to zero may flip."""
    exact = torch.tensor(train(tmp_path / "plain", "allreduce", 1)["weights"])
    rounded = torch.tensor(train(tmp_path / "rounded", "fp16", 1)["weights"])
    assert not torch.equal(exact, rounded)
    assert ((exact - rounded).abs() > 1e-4).double().mean() < 0.051


def train_replicas(
    ranks: int, num_steps: int, synchronize: Callable[[int, list[torch.Tensor]], list[torch.Tensor]]
):
    """Train replicas without hpctrain, each on its share, and call `meet` on the weights after each step."""
    x, y = (column[:1400] for column in samples())
    order = SampleOrder(1400, 1)
    torch.manual_seed(1)
    first = Digits()
    modules = [Digits() for _ in range(ranks)]
    for module in modules:
        module.load_state_dict(first.state_dict())
    optimizers = [module.configure_optimizers() for module in modules]
    for step in range(1, num_steps + 1):
        indices = order.indices(0, (step - 1) * 64, step * 64)
        for rank, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
            low, high = split_range(64, rank, ranks)
            own_indices = indices[low:high]
            loss = module.training_step((x[own_indices], y[own_indices]), 0) * ((high - low) / 64 * ranks)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = [nn.utils.parameters_to_vector(module.parameters()).detach() for module in modules]
        for module, vector in zip(modules, synchronize(step, weights), strict=True):
            nn.utils.vector_to_parameters(vector.clone(), module.parameters())
    return torch.stack([nn.utils.parameters_to_vector(m.parameters()).detach() for m in modules]).mean(0)


def mean_of_all(weights: list[torch.Tensor]) -> list[torch.Tensor]:
    return [torch.stack(weights).mean(0)] * len(weights)


def test_local_sgd_averages_replicas_periodically(tmp_path):
    expected = train_replicas(3, 10, lambda step, w: mean_of_all(w) if step % 4 == 0 else w)
    assert train(tmp_path, "local_sgd", 10, ranks=3)["weights"] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.extended
def test_decentralized_averages_replicas_in_pairs(tmp_path):
    def average_pairs(step: int, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        peers = [tournament_peer(rank, 3, step) for rank in range(3)]
        return [w if p is None else (w + weights[p]) / 2 for w, p in zip(weights, peers, strict=True)]

    expected = train_replicas(3, 10, average_pairs)
    assert train(tmp_path, "decentralized", 10, ranks=3)["weights"] == pytest.approx(
        expected.tolist(), abs=1e-5
    )


@pytest.mark.parametrize("world_size", [2, 5, 8])
def test_tournament_pairs_every_rank_with_every_other(world_size):
    peers_of = {rank: set() for rank in range(world_size)}
    num_turns = world_size - 1 + world_size % 2
    for step in range(num_turns):
        peers = {rank: tournament_peer(rank, world_size, step) for rank in range(world_size)}
        assert all(peer is None or (peers[peer] == rank and peer != rank) for rank, peer in peers.items())
        assert list(peers.values()).count(None) == world_size % 2
        for rank, peer in peers.items():
            peers_of[rank].add(peer)
    all_peers = set(range(world_size)) | ({None} if world_size % 2 else set())
    assert all(others == all_peers - {rank} for rank, others in peers_of.items())


def test_eight_bit_quantization_error_is_at_most_half_a_step():
    rows = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1.0], [1e-6], [0.0]]
    )
    quantized = QuantizedRows.quantize(rows)
    steps = (rows.amax(1) - rows.amin(1)) / 255
    assert (quantized.dequantize() - rows).abs().amax(1).le(steps * 0.51).all()
    assert quantized.nbytes == 3 * 1000 + 3 * 8


@pytest.mark.long
@pytest.mark.parametrize(
    "algorithm", ["bytegrad", "powersgd", "qadam", "low_precision_decentralized", "local_sgd"]
)
def test_stop_at_a_checkpoint_changes_nothing(tmp_path, algorithm):
    """The state of an algorithm is in the checkpoint; qadam is stopped in its warm-up and after it."""
    steps = (25, 50) if algorithm == "qadam" else (5, 10)
    whole = train(tmp_path / "whole", algorithm, steps[-1], checkpoint_every=steps[0])
    for last_step in steps:
        parts = train(tmp_path / "parts", algorithm, last_step, checkpoint_every=steps[0])
    assert parts["weights"] == whole["weights"]


@pytest.mark.extended
@pytest.mark.parametrize("algorithm", ["powersgd", *_long("qadam", "decentralized", "async")])
def test_algorithm_resumes_on_any_number_of_ranks(tmp_path, plain, algorithm):
    for last_step, ranks in ((45, 2), (80, 3), (STEPS, 1)):
        result = train(tmp_path, algorithm, last_step, ranks=ranks)
    assert result["accuracy"] == pytest.approx(plain["accuracy"], abs=0.03)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "bytegard"}, "Did you mean 'bytegrad'"),
        ({"algorithm": "bytegrad", "strategy": "zero1"}, "algorithms work only with"),
        ({"algorithm": "local_sgd", "strategy": "ddp2"}, "strategy is 'ddp2'"),
        ({"algorithm": "local_sgd", "precision": "16-mixed"}, "skip different steps"),
        ({"algorithm": "qadam", "precision": "16-mixed"}, "momenta would include the loss scale"),
        ({"algorithm": "qadam", "gradient_clip_norm": 1.0}, "no averaged gradient to clip"),
    ],
    ids=str,
)
def test_incompatible_settings_are_refused_with_the_reason(settings, message):
    with pytest.raises(hpctrain.UserError, match=message):
        hpctrain.Trainer(max_steps=1, **settings)


def test_registered_algorithm_is_found_by_name():
    @register_algorithm("nothing new")
    class UnchangedAlgorithm(Algorithm):
        pass

    assert isinstance(find_algorithm("nothing new"), UnchangedAlgorithm)
    instance = UnchangedAlgorithm()
    assert find_algorithm(instance) is instance
