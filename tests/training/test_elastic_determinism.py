"""Every bit of the result is the same on any number of ranks."""

import itertools
import math
import os
import random
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_on_ranks
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, WeightedRandomSampler

import hpctrain
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.files import read_json_lines
from hpctrain.rundir import RunDir
from hpctrain.training.determinism import elastic_determinism

pytestmark = pytest.mark.ranks


class Noisy(Dataset):
    """Samples with augmentation."""

    def __len__(self):
        return 230

    def __getitem__(self, index):
        x = torch.full((6,), index / 100).sin() + 0.1 * torch.randn(6)
        return x, torch.tensor([index % 7]), x.sum()


class Net(hpctrain.Module):
    """Dropout, batch norm, an embedding, a scalar parameter, and one that only some steps use."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
        self.norm, self.dropout, self.head = nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 1)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.rare = nn.Parameter(torch.ones(5, 1))

    def forward(self, x, kind):
        x = self.blocks(x + self.embedding(kind.squeeze(1)))
        return self.head(self.dropout(self.norm(x))).squeeze(1) * self.gain

    def training_step(self, batch, batch_idx):
        x, kind, y = batch
        loss = nn.functional.mse_loss(self(x, kind), y)
        if batch_idx % 2:
            loss = loss + 0.01 * self.rare.square().sum()
        return {"loss": loss, "largest": y.max()}

    def validation_step(self, batch, batch_idx):
        x, kind, y = batch
        return {"val_loss": nn.functional.mse_loss(self(x, kind), y)}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def Mixed():  # noqa: N802 (in place of a class)
    return hpctrain.Mixture([Noisy(), Noisy()], weights=[0.3, 0.7])


def Loader():  # noqa: N802 (in place of a class)
    weights = torch.linspace(0.1, 1.0, 230)
    return DataLoader(Noisy(), batch_size=100, sampler=WeightedRandomSampler(weights, 230))


class Kill(hpctrain.Callback):
    """Kills the process in a step: a callback receives the metrics of the step before."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, module, metrics):
        if trainer.step >= self.step - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(run_dir: str, max_steps: int, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Train until `max_steps`, and return the complete state of the module.

    With `kill_at` in the settings, all ranks are killed in that step.
    """
    settings = {"global_batch_size": 100, "gradient_clip_norm": 0.5, "strategy": "ddp", "seed": 3} | settings
    settings = {"checkpoint_every": None, "elastic_determinism": True, "grain_size": 8} | settings
    kill_at, kind = settings.pop("kill_at", None), settings.pop("net", Net)
    data = settings.pop("data", Noisy)
    if kill_at is not None:
        settings["callbacks"] = [Kill(kill_at)]
    settings = {"validate_every": 4} | settings
    trainer = hpctrain.Trainer(max_steps=max_steps, run_dir=run_dir, **settings)
    module = kind()
    trainer.fit(module, data(), Noisy())
    averages = module.averages() if isinstance(module, Averaged) else {}
    return averages | {name: value.clone() for name, value in module.state_dict().items()}


def results(run_dir: Path, plan: list[tuple[int, int]], **settings: Any) -> tuple[Any, Any]:
    """Train on numbers of ranks until steps; return the state on rank 0, and the logged metrics.

    If a number of steps is negative, all ranks are killed in that step.
    """
    state = None
    for world_size, step in plan:
        if step < 0:
            of_call = settings | {"kill_at": -step, "checkpoint_every": 2, "checkpoint_async": False}
            ranks = range(world_size)
            run_on_ranks(train, str(run_dir), 99, of_call, world_size=world_size, killed=ranks)
            continue
        of_ranks = run_on_ranks(train, str(run_dir), step, settings, world_size=world_size)
        state = of_ranks[0]
        for other in of_ranks[1:]:
            assert all(torch.equal(other[name], state[name]) for name in state)
    metrics: dict[int, dict[str, str]] = {}
    for record in read_json_lines(RunDir(run_dir).metrics):
        values = {
            name: repr(record[name])
            for name in record
            if name in ("loss", "largest", "grad_norm", "val_loss")
        }
        step = metrics.setdefault(record["step"], values)
        assert all(step[name] == values[name] for name in step.keys() & values.keys())
        step.update(values)
    return state, metrics


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return results(tmp_path_factory.mktemp("one") / "run", [(1, 12)])


def assert_same(ours: tuple[Any, Any], theirs: tuple[Any, Any]) -> None:
    for name in theirs[0]:
        assert torch.equal(ours[0][name], theirs[0][name]), name
    assert ours[1].keys() == theirs[1].keys()
    for step, values in theirs[1].items():
        # A training that ends at a step also validates there.
        assert ours[1][step] | values == ours[1][step], step


class WithPositions(hpctrain.Module):
    """The gradients of the positions and of the two biases share memory with others in the backward pass."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50, 256), nn.Parameter(torch.zeros(64, 256))
        self.first_bias, self.second_bias = (nn.Parameter(torch.zeros(64 * 256)) for _ in range(2))

    def training_step(self, batch, batch_idx):
        x = self.tokens(batch[0]) + self.positions.unsqueeze(0)
        bias = self.first_bias.view(1, 64, 256) + self.second_bias.view(1, 64, 256)
        return (x + bias - 1.0).square().mean()

    def validation_step(self, batch, batch_idx):
        return {"val_loss": self.training_step(batch, batch_idx)}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=10.0)


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return (torch.randint(0, 50, (64,), generator=torch.Generator().manual_seed(index)),)


def fit_tokens(elastic: bool) -> dict[str, torch.Tensor]:
    # Without gradient accumulation, which PyTorch itself computes incorrectly for such gradients.
    settings = {"elastic_determinism": True, "grain_size": 1, "micro_batch_size": 1} if elastic else {}
    torch.manual_seed(0)
    module = WithPositions()
    trainer = hpctrain.Trainer(max_steps=4, global_batch_size=4, seed=3, checkpoint_every=None, **settings)
    trainer.fit(module, Sentences())
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_gradients_that_share_memory_are_not_changed():
    (plain,) = run_on_ranks(fit_tokens, False, world_size=1)
    (alone,) = run_on_ranks(fit_tokens, True, world_size=1)
    four = run_on_ranks(fit_tokens, True, world_size=4)[0]
    for name, value in plain.items():
        torch.testing.assert_close(alone[name], value, rtol=1e-5, atol=1e-6)
        assert torch.equal(four[name], alone[name]), name


@pytest.mark.parametrize(
    "strategy",
    [
        *(pytest.param(name, marks=pytest.mark.long) for name in ("zero1", "zero2", "zero3")),
        pytest.param("fsdp", marks=pytest.mark.extended),
    ],
)
def test_strategy_does_not_change_a_bit(undisturbed, tmp_path, strategy):
    assert_same(results(tmp_path / "run", [(3, 12)], strategy=strategy), undisturbed)


@pytest.mark.fully_sharded
@pytest.mark.parametrize("batch", [pytest.param(96, marks=pytest.mark.long), 100])
def test_resized_and_killed_run_equals_one_undisturbed_rank(tmp_path, batch):
    reference = results(tmp_path / "one", [(1, 16)], global_batch_size=batch)
    run, plan = tmp_path / "run", [(4, -5), (3, 7), (5, -10), (1, 11), (2, 16)]
    for number, (world_size, step) in enumerate(plan):
        strategy = "zero3" if number in (1, 2) else "ddp"
        ours = results(run, [(world_size, step)], global_batch_size=batch, strategy=strategy)
    assert_same(ours, reference)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.fully_sharded
@pytest.mark.parametrize("seed", range(100))
def test_random_resizing_plan_does_not_change_a_bit(undisturbed, tmp_path, seed):
    draw, step, plan = random.Random(seed), 0, []
    while step < 12:
        step = min(12, step + draw.randint(1, 6))
        world_size, is_killed = draw.randint(1, 6), step < 12 and draw.random() < 0.3
        plan.append((world_size, -step if is_killed else step))
    for each in plan:
        strategy = draw.choice(["ddp", "zero1", "zero2", "zero3"])
        ours = (
            results(tmp_path / "run", [each], strategy=strategy, bucket_cap_mb=draw.choice([None, 1e-4]))
            if strategy in ("ddp", "zero1")
            else results(tmp_path / "run", [each], strategy=strategy)
        )
    assert_same(ours, undisturbed)


class Tokens(Net):
    """A loss that is a mean over tokens, of which samples have different numbers."""

    def training_step(self, batch, batch_idx):
        x, kind, y = batch
        weights = kind.squeeze(1) + 1
        losses = (self(x, kind) - y).square() * weights
        return {"loss": losses.sum() / weights.sum(), "num_tokens": weights.sum()}


class WithoutNorm(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(6)


class WithoutRare(Net):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, 0)


class TwoOptimizers(Net):
    def configure_optimizers(self):
        head = list(self.head.parameters())
        rest = [p for name, p in self.named_parameters() if not name.startswith("head")]
        return [torch.optim.SGD(head, lr=0.01, momentum=0.9), torch.optim.Adam(rest, lr=0.01)], []


class OnlyHead(Net):
    """Trainable parameters that belong to no optimizer, and a validation with random numbers."""

    def validation_step(self, batch, batch_idx):
        return {"val_loss": super().validation_step(batch, batch_idx)["val_loss"] + torch.rand(())}

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=0.01)


class Shared(Net):
    """Layers that are used twice, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.blocks[1] = self.blocks[0]
        self.embedding.requires_grad_(False)


class Double(WithoutNorm):
    """Gradients that are no float32 numbers, and a metric of -0.0."""

    def __init__(self):
        super().__init__()
        self.double()

    def training_step(self, batch, batch_idx):
        x, kind, y = batch
        loss = nn.functional.mse_loss(self(x.double(), kind), y.double())
        return {"loss": loss * 10.0 ** (60 * (-1) ** batch_idx), "largest": -torch.zeros(())}

    def validation_step(self, batch, batch_idx):
        return {"val_loss": self(batch[0].double(), batch[1]).mean()}


class Fractions(Tokens):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output | {"num_tokens": output["num_tokens"] / 3}


FEATURES = {
    "fractions of tokens": {"net": Fractions},
    "parameters without an optimizer": {"net": OnlyHead},
    "shared layers": {"net": Shared},
    "mixture": {"data": Mixed},
    "loader": {"data": Loader},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"precision": "16-mixed"},
    "bf16-true": {"precision": "bf16-true", "gradient_clip_norm": None},
    "tokens": {"net": Tokens},
    "two optimizers": {"net": TwoOptimizers, "gradient_clip_value": 0.05},
    "recompute": {"recompute": ["blocks.*"]},
    "float64": {"net": Double, "grain_size": 100, "gradient_clip_norm": 1e60},
    "one grain": {"grain_size": 100},
    "one grain per rank": {"grain_size": 34, "bucket_cap_mb": 1e-4},
    "two grains": {"grain_size": 50, "bucket_cap_mb": 1e-4},
    "two grains without buffers": {"grain_size": 50, "net": WithoutNorm},
    "single samples": {"grain_size": 1, "global_batch_size": 4, "net": WithoutNorm},
    "no clipping": {"gradient_clip_norm": None, "warmup_steps": 3},
    "data workers": {"num_workers": 1},
}


#: Features that every run tests, and those of the extended tests; `--long` adds the others.
ALWAYS_TESTED = {"mixture", "16-mixed", "tokens", "two optimizers"}
EXTENDED = {"shared layers", "one grain per rank", "two grains without buffers"}


@pytest.mark.parametrize(
    "feature",
    [
        name
        if name in ALWAYS_TESTED
        else pytest.param(name, marks=pytest.mark.extended if name in EXTENDED else pytest.mark.long)
        for name in FEATURES
    ],
)
def test_features_do_not_change_a_bit(tmp_path, feature):
    settings = FEATURES[feature]
    reference = results(tmp_path / "one", [(1, 6)], **settings)
    assert_same(results(tmp_path / "three", [(3, 4), (2, 6)], **settings), reference)


@pytest.mark.long
@pytest.mark.parametrize("feature", [name for name in FEATURES if "grain_size" not in FEATURES[name]])
def test_features_have_the_same_bits_on_the_same_ranks_without_elastic_determinism(tmp_path, feature):
    plain = {"elastic_determinism": False, "grain_size": None, "find_unused_parameters": True}
    settings = FEATURES[feature] | plain
    reference = results(tmp_path / "whole", [(3, 6)], **settings)
    assert_same(results(tmp_path / "parts", [(3, 4), (3, 6)], **settings), reference)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
@pytest.mark.parametrize("feature", FEATURES)
def test_features_with_another_strategy_do_not_change_a_bit(tmp_path, feature, strategy):
    settings = FEATURES[feature]
    if strategy != "zero1":
        settings = {name: value for name, value in settings.items() if name != "bucket_cap_mb"}
    reference = results(tmp_path / "one", [(1, 6)], **settings)
    assert_same(results(tmp_path / "three", [(3, 6)], strategy=strategy, **settings), reference)


@pytest.mark.extended
@pytest.mark.parametrize(
    "settings",
    [
        {"bucket_cap_mb": 1e-4},
        {"micro_batch_size": 24},
        pytest.param({"micro_batch_size": 24, "strategy": "zero3"}, marks=pytest.mark.fully_sharded),
        {"strategy": "ddp_spawn"},
        {"strategy": "ddp2"},
    ],
)
def test_settings_without_an_effect_do_not_change_a_bit(undisturbed, tmp_path, settings):
    assert_same(results(tmp_path / "run", [(2, 12)], **settings), undisturbed)


class Contrast(Net):
    """A loss that compares the samples of a node with each other."""

    def training_step(self, batch, batch_idx):
        x, kind, y = batch
        return {"left": self.blocks(x + self.embedding(kind.squeeze(1))), "right": y}

    def training_step_end(self, outputs):
        left, right = outputs["left"].sum(1) * self.gain, outputs["right"]
        return (left[:, None] - left[None] - right[:, None] + right[None]).abs().mean()


def test_loss_over_the_samples_of_a_node_has_the_same_bits(tmp_path):
    settings = {"strategy": "ddp2", "net": Contrast, "grain_size": 20}
    reference = results(tmp_path / "one", [(1, 6)], **settings)
    assert_same(results(tmp_path / "three", [(3, 4), (2, 6)], **settings), reference)


class Averaged(Net):
    """A moving average of the parameters in the optimizer's state."""

    def configure_optimizers(self):
        self.optimizer, schedule = super().configure_optimizers()
        self.optimizer.register_step_post_hook(self.average)
        return self.optimizer, schedule

    @torch.no_grad()
    def average(self, optimizer, *_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if "average" in state:
                    state["average"].lerp_(parameter, 0.1)
                elif parameter.grad is not None:
                    state["average"] = parameter.clone()

    def averages(self):
        values = [state["average"] for state in self.optimizer.state.values()]
        values = [value.full_tensor() if isinstance(value, DTensor) else value for value in values]
        return {f"average {number}": value for number, value in enumerate(values)}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("net", "strategy"),
    [
        (Averaged, "zero3"),
        pytest.param(Averaged, "zero1", marks=pytest.mark.long),
        pytest.param(Averaged, "zero2", marks=pytest.mark.long),
    ],
)
def test_moving_average_has_the_same_bits(tmp_path, net, strategy):
    reference = results(tmp_path / "one", [(1, 6)], net=net)
    assert any("average" in name for name in reference[0])
    results(tmp_path / "run", [(3, 4)], net=net, strategy=strategy)
    assert_same(results(tmp_path / "run", [(2, 6)], net=net), reference)
    assert_same(results(tmp_path / "three", [(3, 6)], net=net, strategy=strategy), reference)


class WithTable(Net):
    """A constant buffer with missing values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.tensor([math.nan, 1.0, math.inf]))


def test_missing_values_in_a_buffer_do_not_spread(tmp_path):
    state = train(str(tmp_path / "run"), 2, {"net": WithTable, "validate_every": None})
    torch.testing.assert_close(state["table"], torch.tensor([math.nan, 1.0, math.inf]), equal_nan=True)


def fit_twice() -> bool:
    module, settings = Net(), {"max_steps": 2, "global_batch_size": 16, "checkpoint_every": None, "seed": 3}
    weights = []
    for _ in range(2):
        hpctrain.Trainer(**settings, elastic_determinism=True, grain_size=4).fit(module, Noisy())
        weights.append(module.head.weight.detach().clone())
    return torch.equal(*weights)


def test_module_can_be_trained_twice():
    assert run_on_ranks(fit_twice) == [False, False]


def evaluate() -> tuple[Any, Any]:
    """Evaluate outside of a training, with random numbers."""
    trainer = hpctrain.Trainer(
        max_steps=1, global_batch_size=100, elastic_determinism=True, seed=3, grain_size=8
    )
    torch.manual_seed(1)
    module = OnlyHead()
    module.predict_step = lambda batch, batch_idx: module(*batch[:2]) + torch.rand(())
    random_state = torch.get_rng_state()
    means, outputs = trainer.validate(module, Noisy()), trainer.predict(module, Noisy())
    assert torch.equal(torch.get_rng_state(), random_state)
    return means, torch.cat(outputs).tolist()


def test_evaluations_outside_of_a_training_have_the_same_bits_on_all_ranks():
    (alone,) = run_on_ranks(evaluate, world_size=1)
    assert run_on_ranks(evaluate, world_size=3) == [alone] * 3


class Overflowing(WithoutNorm):
    """Gradients that are infinite with the first scales of float16."""

    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output | {"loss": output["loss"] * 1e30}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(Noisy())


def changed(change: Callable[[Net], object], *, in_step: bool = False) -> type[Net]:
    """Return a module class to which `change` is applied, after its initialization or in each step."""

    class Changed(Net):
        def __init__(self):
            super().__init__()
            self.seen = nn.Buffer(torch.zeros(1, dtype=torch.bool))
            self.sizes = nn.Buffer(torch.zeros(1))
            if not in_step:
                change(self)

        def training_step(self, batch, batch_idx):
            if in_step:
                change(self)
            return super().training_step(batch, batch_idx)

    return Changed


def layer(name: str, make: Callable[[], nn.Module]) -> type[Net]:
    """Return a module class with another layer."""
    return changed(lambda net: setattr(net, name, make()))


class Reentrant(Net):
    """Two checkpointed calls of the same layers, each with its own backward pass."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Identity()
        self.rare.requires_grad_(False)

    def forward(self, x, kind):
        for _ in range(2):
            x = checkpoint(self.blocks, x + self.embedding(kind.squeeze(1)), use_reentrant=True)
        return self.head(x).squeeze(1) * self.gain


class Alternating(Net):
    def training_step(self, batch, batch_idx, optimizer_idx):
        return super().training_step(batch, batch_idx)["loss"]


class Complex(Net):
    def __init__(self):
        super().__init__()
        self.phase = nn.Parameter(torch.ones(1, dtype=torch.complex64))

    def forward(self, x, kind):
        return super().forward(x, kind) * self.phase.abs()


class Changing(Net):
    def training_step(self, batch, batch_idx):
        output = super().training_step(batch, batch_idx)
        return output if batch[0][0, 0] > 0.5 else output | {"other": torch.zeros(())}


class Fused(Net):
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, fused=True)


class Thawing(Net):
    def __init__(self):
        super().__init__()
        self.embedding.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        self.embedding.requires_grad_(batch_idx > 0)
        return super().training_step(batch, batch_idx)


class Foreign(Net):
    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(1))], lr=0.01)


def grow(net: Net) -> None:
    net.sizes = torch.cat([net.sizes, net.sizes[:1]])


Lazy = layer("head", lambda: nn.LazyLinear(1))

REFUSALS = [
    ({"strategy": "pipeline"}, "strategy is 'pipeline'"),
    ({"strategy": "dp"}, "strategy is 'dp'"),
    ({"strategy": "ddp2", "net": Contrast, "grain_size": None}, "training_step_end combines samples"),
    ({"algorithm": "fp16"}, "algorithm is 'fp16'"),
    ({"compile": True}, "compile is True"),
    ({"on_bad_loss": "skip"}, "on_bad_loss is 'skip'"),
    ({"micro_batch_size": 12}, "must be a multiple of grain_size"),
    ({"net": Alternating}, "accepts optimizer_idx"),
    ({"net": changed(grow, in_step=True)}, "added the buffer sizes or changed its shape"),
    (
        {"net": changed(lambda net: net.seen.fill_(True), in_step=True)},
        "changed the buffer seen of type torch.bool",
    ),
    ({"net": Complex}, "gradient of phase is complex"),
    ({"data": Stream}, "is a stream"),
    ({"net": Changing}, "Return or log the same metrics for every grain"),
    ({"net": Fused, "strategy": "zero1"}, "has fused=True"),
    (
        {"net": layer("embedding", lambda: nn.Embedding(7, 6, sparse=True))},
        "gradient of embedding.weight is sparse",
    ),
    ({"net": Thawing}, "embedding.weight was frozen when training began"),
    (
        {"net": layer("embedding", lambda: nn.Embedding(7, 6, max_norm=0.5))},
        "changed the parameter embedding.weight",
    ),
    ({"net": Reentrant, "bucket_cap_mb": 1e-4}, "use_reentrant=False"),
    ({"net": Foreign}, "updates a parameter that no module contains"),
    ({"seed_samples": False}, "seed_samples is False"),
    ({"net": Lazy}, "head.weight belongs to a lazy layer"),
    ({"net": Lazy, "elastic_determinism": False, "grain_size": None}, "head.weight belongs to a lazy layer"),
    ({"net": layer("norm", lambda: nn.SyncBatchNorm(6))}, "contains a SyncBatchNorm"),
    ({"net": changed(lambda net: setattr(net, "head", torch.compile(net.head)))}, "the module is compiled"),
    ({"net": changed(lambda net: net.head.compile())}, "the module is compiled"),
]


@pytest.mark.parametrize(("settings", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_dependence_on_the_ranks_is_refused(tmp_path, settings, message):
    with pytest.raises(hpctrain.UserError, match=re.escape(message)):
        train(str(tmp_path / "run"), 2, settings)


def errors_with_shards(strategy: str) -> list[str]:
    errors = []
    for kind in (torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Rprop):
        module = WithoutRare()
        module.configure_optimizers = lambda: kind(module.parameters())  # noqa: B023 (called in this pass)
        trainer = hpctrain.Trainer(max_steps=1, global_batch_size=8, strategy=strategy, checkpoint_every=None)
        with pytest.raises(hpctrain.UserError) as caught:
            trainer.fit(module, Noisy())
        errors.append(str(caught.value))
    return errors


@pytest.mark.parametrize("strategy", [pytest.param("zero1", marks=pytest.mark.extended), "zero3"])
def test_optimizers_that_do_not_support_shards_are_refused(strategy):
    adafactor, adagrad, rprop = run_on_ranks(errors_with_shards, strategy, world_size=2)[0]
    assert adafactor.startswith("Adafactor needs complete rows and columns of each parameter, so it cannot")
    assert adagrad.startswith("Adagrad creates its state before")
    assert rprop.startswith("Rprop selects elements by conditions")


def train_on_mixed_hardware(*arguments: Any) -> None:
    if os.environ["RANK"] == "1":
        elastic_determinism.describe_hardware = lambda device: "another CPU"
    train(*arguments)


def test_different_hardware_is_reported_fake_name(tmp_path):
    settings = {"witness_every": 1}
    arguments = (str(tmp_path / "run"), 2, settings)
    outputs = run_on_ranks(train_on_mixed_hardware, *arguments, returns_output=True)
    assert "The ranks compute on different hardware" in outputs[0], outputs


def test_checkpoint_without_elastic_determinism_is_continued(tmp_path):
    """A run that did not compare its gradients is verified from its checkpoint on."""
    trainer = hpctrain.Trainer(max_steps=2, global_batch_size=100, run_dir=tmp_path / "run", seed=3)
    trainer.fit(Net(), Noisy())
    run_on_ranks(train, str(tmp_path / "run"), 3, {"witness_every": 5, "validate_every": None}, world_size=2)
    loaded, _ = CheckpointStore(RunDir(tmp_path / "run").checkpoints).load_newest()
    assert (loaded.step, loaded.verified_step) == (3, 2)


def test_grain_size_without_elastic_determinism_is_refused():
    with pytest.raises(hpctrain.UserError, match="elastic_determinism is False"):
        hpctrain.Trainer(max_steps=1, grain_size=4)


def test_checkpoint_with_another_grain_size_is_refused(tmp_path):
    train(str(tmp_path / "run"), 2, {})
    with pytest.raises(hpctrain.UserError, match="grain_size=8, but this script uses 4"):
        train(str(tmp_path / "run"), 4, {"grain_size": 4})


def test_other_torch_or_device_is_reported_fake_names(tmp_path, monkeypatch, capsys):
    train(str(tmp_path / "run"), 2, {})
    monkeypatch.setattr(torch, "__version__", "9.9")
    monkeypatch.setattr(elastic_determinism, "describe_hardware", lambda device: "another CPU")
    train(str(tmp_path / "run"), 4, {})
    out = capsys.readouterr().out
    assert "The version of torch is 9.9, but was 2." in out, out
    assert re.search("The device is another CPU, but was .* when the checkpoint was saved", out), out


def test_overflow_of_the_loss_scale_skips_the_step_on_all_ranks(tmp_path):
    settings = {"net": Overflowing, "precision": "16-mixed", "on_bad_loss": None}
    reference = results(tmp_path / "one", [(1, 4)], **settings)
    assert_same(results(tmp_path / "two", [(2, 4)], **settings), reference)


@pytest.mark.parametrize("value", [math.nan, pytest.param(math.inf, marks=pytest.mark.extended)])
def test_bad_gradient_reaches_the_loss_guard(tmp_path, value):
    class Bad(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)["loss"]
            if batch_idx == 1:
                self.head.weight.register_hook(lambda gradient: gradient * value)
            return loss

    with pytest.raises(hpctrain.BadLoss):
        train(str(tmp_path / "run"), 5, {"net": Bad})
    steps = [record["step"] for record in read_json_lines(RunDir(tmp_path / "run").metrics)]
    assert steps == [1, 2]


class MixedTypes(hpctrain.Module):
    """A layer of another type outside of a block, or in its own."""

    def __init__(self, has_own_block):
        super().__init__()
        double = nn.Linear(3, 1).double()
        self.first, self.last = nn.Linear(6, 3), nn.Sequential(double) if has_own_block else double

    def training_step(self, batch, batch_idx):
        return self.last(self.first(batch[0]).double()).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def train_mixed_types(strategy: str) -> list[str]:
    """Train without and with a block for the other type, each without and with elastic determinism."""
    messages = []
    for has_own_block, elastic in itertools.product((False, True), repeat=2):
        trainer = hpctrain.Trainer(
            max_steps=1,
            global_batch_size=8,
            checkpoint_every=None,
            strategy=strategy,
            elastic_determinism=elastic,
        )
        try:
            trainer.fit(MixedTypes(has_own_block), Noisy())
            messages.append("trained")
        except hpctrain.UserError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp", marks=pytest.mark.long)])
def test_parameter_types_that_cannot_be_gathered_together_are_refused(strategy):
    plain, elastic, *with_block = run_on_ranks(train_mixed_types, strategy, world_size=2)[0]
    assert elastic == plain
    assert plain.startswith(
        f"strategy is '{strategy}', which gathers first.bias (torch.float32) and last.bias (torch.float64)"
    )
    assert with_block == ["trained"] * 2
