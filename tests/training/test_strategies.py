"""Strategies: each trains like one process, has its own features, and resumes after a stop."""

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers import SCRIPTS
from helpers.commands import run_command
from helpers.fake_gpu_driver import FakeDriver, install_fake_driver
from helpers.fork_server import run_forked
from helpers.horovod_version import is_horovod_loadable, needs_horovod
from helpers.ranks import on_ranks, run_on_ranks
from test_exact_gradients import trained_samples
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from train_with_strategies import Blocks, samples, train_manually

import hpctrain
from hpctrain.errors import UserError
from hpctrain.files import read_json_lines
from hpctrain.training.algorithms import Algorithm
from hpctrain.training.base.device_selection import choose_devices, find_devices
from hpctrain.training.strategies import STRATEGIES, Strategy, find_strategy, register_strategy, sharded
from hpctrain.training.strategies.ddp import DDP

#: Strategies on `fully_shard`.
FULLY_SHARDED = ("zero2", "zero3") if torch.__version__ >= "2.8" else ()

SCRIPT = SCRIPTS / "train_with_strategies.py"

VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}


def train(folder: Path, *trainings: dict, ranks: int, run: Path | None = None, nodes: int = 1) -> list[dict]:
    """Return the results of trainings with these settings, one after the other in the same processes."""
    variables = VARIABLES if run is None else {**VARIABLES, "HPCTRAIN_RUN_DIR": str(run)}
    run_forked(SCRIPT, [str(folder / "out"), json.dumps(trainings)], variables, ranks=ranks, nodes=nodes)
    return torch.load(folder / "out", weights_only=True)


def evaluate(weights: dict) -> tuple[float, torch.Tensor]:
    """Return the loss over all samples and the predictions, on one process."""
    module = Blocks()
    module.load_state_dict(weights)
    with torch.no_grad():
        return module.validation_step(samples(), 0).item(), module.predict_step(samples(), 0)


def assert_same(actual: dict, expected: dict, **tolerance: float) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(actual[name], value, **(tolerance or {"rtol": 1e-9, "atol": 1e-12})), name


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 3),
        pytest.param("zero1", 2, marks=pytest.mark.long),
        pytest.param("zero2", 3, marks=pytest.mark.long),
        ("zero3", 2),
        pytest.param("horovod", 2, marks=needs_horovod),
        ("pipeline", 2),
        pytest.param("pipeline", 3, marks=pytest.mark.long),
    ],
)
def test_one_and_fifty_steps_are_those_of_one_process(tmp_path, strategy, ranks):
    """Shares of 10 samples and of 3 on as many ranks; rows that no number of ranks divides; a scalar.

    Ranks start with different weights and end with the same. Some parameters are unused in some steps.
    """
    single, fifty, micro_batched, with_unused = train(
        tmp_path,
        {"strategy": strategy, "max_steps": 1, "predict": True},
        {"strategy": strategy, "max_steps": 50},
        {"strategy": strategy, "max_steps": 5, "micro_batch_size": 2},
        {"strategy": strategy, "max_steps": 5, "sometimes": True, "find_unused_parameters": True},
        ranks=ranks,
    )
    assert_same(single["weights"], train_manually(1))
    assert_same(fifty["weights"], train_manually(50))
    assert_same(micro_batched["weights"], train_manually(5))
    assert_same(with_unused["weights"], train_manually(5, sometimes=True))
    assert all(result["alike"] for result in (single, fifty, micro_batched, with_unused))
    loss, predictions = evaluate(single["weights"])
    assert single["metrics"]["val_loss"] == pytest.approx(loss, rel=1e-12)
    assert torch.allclose(single["predictions"], predictions, rtol=1e-12)


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kind",
    [{}, pytest.param({"lightning": True}, marks=pytest.mark.extended)],
    ids=["Module", "LightningModule"],
)
def test_twelve_steps_of_both_kinds_of_modules_are_those_of_one_process(tmp_path, kind):
    if kind and find_spec("lightning") is None:
        pytest.skip("Lightning is not installed")
    names = ["ddp", "ddp_spawn", "ddp2", "zero1", *FULLY_SHARDED]
    names += ["ddp_sharded", "fsdp"] if FULLY_SHARDED else []
    trainings = [{"strategy": name, "max_steps": 12, **kind} for name in names]
    results = train(tmp_path, *trainings, ranks=2)
    results += train(tmp_path, {"strategy": "dp", "devices": 3, "max_steps": 12, **kind}, ranks=1)
    for name, result in zip([*names, "dp"], results, strict=True):
        assert "error" not in result, (name, result)
        assert_same(result["weights"], train_manually(12))
        loss, _ = evaluate(result["weights"])
        assert result["metrics"]["val_loss"] == pytest.approx(loss, rel=1e-12), name


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
def test_lightning_module_is_refused_with_strategies_that_compute_elsewhere(tmp_path):
    names = ["pipeline", *(["horovod"] if is_horovod_loadable() else [])]
    results = train(tmp_path, *({"strategy": name, "lightning": True} for name in names), ranks=2)
    for name, result in zip(names, results, strict=True):
        message = f"strategy='{name}' is not supported for the LightningModule LightningBlocks. Remove"
        assert message in result["error"]


@pytest.mark.ranks
def test_zero1_is_bitwise_equal_to_ddp(tmp_path):
    ddp, zero1 = train(tmp_path, *({"strategy": name, "max_steps": 20} for name in ("ddp", "zero1")), ranks=3)
    assert all(torch.equal(zero1["weights"][name], value) for name, value in ddp["weights"].items())
    assert zero1["metrics"] == ddp["metrics"]


def count_exchanges() -> list[int]:
    """Return the gradient collectives of four steps, by strategy and micro-batch size."""
    counts = []

    class CountingAlgorithm(Algorithm):
        def attach(self, parallel):
            parallel.register_comm_hook(None, self.exchange)

        def exchange(self, _state, bucket):
            counts[-1] += 1
            return allreduce_hook(None, bucket)

    def counted(original):
        def call(*args, **kwargs):
            counts[-1] += 1
            return original(*args, **kwargs)

        return call

    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        if hasattr(dist, name):
            setattr(dist, name, counted(getattr(dist, name)))
    for strategy, more in (("ddp", {"algorithm": CountingAlgorithm()}), ("zero3", {})):
        for size in (None, 2):
            counts.append(0)
            trainer = hpctrain.Trainer(
                max_steps=4, global_batch_size=10, strategy=strategy, micro_batch_size=size, **more
            )
            trainer.fit(Blocks(), samples())
    return counts


@pytest.mark.ranks
def test_gradients_are_exchanged_once_per_step_or_per_micro_batch_with_zero3():
    counts, _ = run_on_ranks(count_exchanges, group=False)
    ddp, ddp_in_parts, zero3, zero3_in_parts = counts
    assert ddp == ddp_in_parts > 0
    assert zero3_in_parts == 2.5 * zero3  # three batches of ten in three parts, one of three in one


def train_with_unused_parameters() -> None:
    hpctrain.Trainer(max_steps=3, global_batch_size=10).fit(Blocks(sometimes=True), samples())


@pytest.mark.ranks
def test_unused_parameters_are_reported():
    with pytest.raises(AssertionError, match=r"did not use detour.weight, detour.bias, .* find_unused_par"):
        run_on_ranks(train_with_unused_parameters, group=False)


class Watched(Blocks):
    def configure_optimizers(self):
        self.watched = super().configure_optimizers()
        return self.watched


class CountStates(hpctrain.Callback):
    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def on_step_end(self, trainer, module, metrics):
        self.counts.append(len(module.watched[0].state))


def count_optimizer_states(run: Path) -> list[int]:
    """Return how many parameters of this stage have optimizer state, after each step of two trainings."""
    counts = []
    for steps in (4, 8):
        trainer = hpctrain.Trainer(
            max_steps=steps,
            global_batch_size=10,
            strategy="pipeline",
            run_dir=run,
            checkpoint_every=2,
            callbacks=[CountStates(counts)],
        )
        trainer.fit(Watched(), samples())
    return counts


@pytest.mark.ranks
def test_stage_keeps_its_optimizer_state_and_checkpoints_have_all(tmp_path):
    counts, _ = run_on_ranks(count_optimizer_states, tmp_path / "run", group=False)
    assert counts == [6] * 8  # of eight parameters, two are the other stage's


class Identity(hpctrain.Module):
    """The loss is zero if both stages draw the same noise."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.how = mode
        self.net = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        for layer in self.net:
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        noise = torch.randn_like(x)
        loss = (self.net(x + noise) - x - noise).pow(2).mean()
        if self.how == "twice":
            loss = loss + self.net(-x).mean()
        if self.how == "penalty":
            loss = loss + sum(p.pow(2).sum() for p in self.parameters())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class KeepLosses(hpctrain.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, trainer, module, metrics):
        self.losses.append(metrics["loss"])


def train_pipeline(mode: str) -> list[float]:
    callback = KeepLosses()
    trainer = hpctrain.Trainer(max_steps=3, global_batch_size=7, strategy="pipeline", callbacks=[callback])
    trainer.fit(Identity(mode), (torch.randn(21, 1),))
    return callback.losses


@pytest.mark.ranks
def test_first_and_last_stage_draw_the_same_noise():
    for losses in run_on_ranks(train_pipeline, "noise", group=False):
        assert len(losses) == 3
        assert max(losses) < 1e-12


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("mode", "message"), [("twice", "more than once"), ("penalty", r"uses net.0.weight outside the Seq")]
)
def test_steps_that_stages_cannot_share_are_refused(mode, message):
    with pytest.raises(AssertionError, match=message):
        run_on_ranks(train_pipeline, mode, group=False)


@pytest.mark.ranks
def test_running_means_are_those_of_rank_0(tmp_path):
    names = ["ddp", "zero1", *FULLY_SHARDED]
    expected, *others = train(
        tmp_path, *({"strategy": name, "max_steps": 2, "norm": True} for name in names), ranks=2
    )
    for other in others:
        assert_same(other["weights"], expected["weights"])


@pytest.mark.extended
@pytest.mark.fully_sharded
@pytest.mark.ranks
def test_run_resumes_under_other_strategies_and_numbers_of_ranks(tmp_path):
    """A checkpoint is complete, whoever held which part; no sample is lost or repeated."""
    run = tmp_path / "run"
    chain = [
        ("zero3", 3),
        ("zero1", 2),
        ("ddp", 1),
        ("zero2", 4),
        ("pipeline", 2),
        ("zero3", 2),
        ("pipeline", 3),
    ]
    if is_horovod_loadable():
        chain.append(("horovod", 2))
    for part, (strategy, ranks) in enumerate(chain, 1):
        (result,) = train(tmp_path, {"strategy": strategy, "max_steps": 6 * part}, ranks=ranks, run=run)
        assert result["step"] == 6 * part
    assert_same(result["weights"], train_manually(6 * len(chain)))
    undisturbed = tmp_path / "undisturbed"
    train(tmp_path, {"max_steps": 6 * len(chain)}, ranks=1, run=undisturbed)
    assert trained_samples(run) == trained_samples(undisturbed)


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.parametrize(
    "strategy",
    [*(pytest.param(each, marks=pytest.mark.long) for each in ("zero1", "zero2")), "zero3", "pipeline"],
)
def test_stopped_run_resumes_bitwise(tmp_path, strategy):
    """One rank of three gets a stop signal; all save the same step and exit with 75."""
    stop_at = 45 if strategy == "pipeline" else 5  # a step has ten micro-batches
    settings = {"strategy": strategy, "max_steps": 12}
    run, undisturbed = tmp_path / "run", tmp_path / "undisturbed"
    (expected,) = train(tmp_path, settings, ranks=3, run=undisturbed)
    with pytest.raises(AssertionError, match="exit code 75"):
        train(tmp_path, {**settings, "stop_at": stop_at}, ranks=3, run=run)
    (result,) = train(tmp_path, settings, ranks=3, run=run)
    assert all(torch.equal(result["weights"][name], value) for name, value in expected["weights"].items())
    assert trained_samples(run) == trained_samples(undisturbed)
    resumed = [event["step"] for event in read_json_lines(run / "events.jsonl") if event["kind"] == "resumed"]
    assert len(resumed) == 1
    assert 5 <= resumed[0] < 12


@pytest.mark.ranks
def test_overflow_on_one_rank_skips_the_step_on_all(tmp_path):
    """All ranks lower the float16 scale, although each sees only its part of the gradients."""
    expected, *others = train(
        tmp_path,
        *(
            {"strategy": name, "max_steps": 5, "precision": "16-mixed", "overflow_at": 2}
            for name in ("ddp", "zero1", *FULLY_SHARDED)
        ),
        ranks=2,
    )
    assert all(value.isfinite().all() for value in expected["weights"].values())
    for other in others:
        assert_same(other["weights"], expected["weights"], rtol=1e-6, atol=1e-9)


MEMORY = """
import ctypes, re, sys, torch, hpctrain
from importlib.util import find_spec
from pathlib import Path
from torch import nn

# Memory that is freed goes back at once (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD): what is resident is held.
for parameter in (-1, -3):
    ctypes.CDLL(None).mallopt(parameter, 65536)

class Wide(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16)))  # 64 MiB

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-4)

def megabytes(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

class Told(torch.utils.data.Dataset):
    # The peak is looked at before fit brings the module together again.
    def __len__(self):
        return 32

    def __getitem__(self, index):
        peaks.append(megabytes("VmHWM"))
        return (torch.randn(1024),)

peaks = []
before = megabytes("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew (proc(5))
trainer = hpctrain.Trainer(max_steps=4, global_batch_size=8, strategy=sys.argv[1])
trainer.fit(Wide(), Told())
print("PEAK", (peaks[-1] - before) / 64)
"""


@pytest.mark.ranks
@pytest.mark.long
def test_peak_memory_decreases_with_the_zero_stage(tmp_path):
    """Adam keeps two numbers per parameter: on 4 ranks, ddp holds 4 modules, zero1 2.5, zero2 2 and zero3 1.

    Buckets add to this, and with zero3 the block that computes.
    """
    script = tmp_path / "memory.py"
    script.write_text(MEMORY)
    ddp, zero1, zero2, zero3 = (
        float(run_forked(script, [name], VARIABLES, ranks=4).splitlines()[-1].split()[1])
        for name in ("ddp", "zero1", "zero2", "zero3")
    )
    assert ddp > zero1 + 0.5
    assert zero1 > zero2 + 0.2
    assert zero2 > zero3 + 0.3


def test_strategy_without_synchronization_is_refused():
    class Alone(Strategy):
        def on_optimizer_step_end(self, step):
            pass

    context = SimpleNamespace(is_distributed=True, ranks=SimpleNamespace(world_size=2))
    with pytest.raises(
        UserError, match=r"\(Alone\) overrides none of .*each of the 2 ranks would train alone"
    ):
        Alone(Blocks(), context, SimpleNamespace(strategy="mine"))


def test_torch_that_cannot_shard_modules_is_refused_with_both_versions(monkeypatch):
    def fully_shard(module, *, mesh=None, reshard_after_forward=True):
        raise AssertionError

    monkeypatch.setattr(sharded, "fully_shard", fully_shard)
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    context = SimpleNamespace(is_distributed=True, ranks=SimpleNamespace(world_size=2))
    with pytest.raises(UserError, match=r"zero3' needs torch 2\.8 or newer, but torch 2\.6\.0 is"):
        sharded.ZeRO3(Blocks(), context, SimpleNamespace(strategy="zero3")).place()


def test_built_in_and_registered_strategies_are_found(monkeypatch):
    @register_strategy("mine")
    class Mine(DDP):
        pass

    assert find_strategy("mine", {}) is Mine
    monkeypatch.delitem(STRATEGIES.registered, "mine")
    with pytest.raises(UserError, match="'mine'"):
        find_strategy("mine", {})
    for name in STRATEGIES.ours:
        if name != "horovod":
            assert issubclass(find_strategy(name, {}), Strategy)
    with pytest.raises(UserError, match="Did you mean 'zero3'"):
        find_strategy("zero33", {})
    with pytest.raises(UserError, match="does not support TPUs"):
        find_strategy("tpu", {})


@pytest.mark.slow
def test_strategy_of_an_installed_package_is_found(tmp_path):
    (tmp_path / "theirs.py").write_text(
        "from hpctrain.training.strategies import Strategy\nclass Theirs(Strategy):\n    pass\nnothing = 3\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[hpctrain.strategies]\ntheirs = theirs:Theirs\nbroken = theirs:nothing\n"
    )
    code = (
        "import hpctrain\nfrom hpctrain.training.strategies import find_strategy\n"
        "print(find_strategy('theirs', {}).__name__)\n"
        "try: find_strategy('broken', {})\n"
        "except hpctrain.UserError as error: print(error)\n"
    )
    printed = run_command([sys.executable, "-c", code], {"PYTHONPATH": str(tmp_path)}).stdout
    assert printed.startswith("Theirs\n")
    assert (
        "theirs:nothing, which is not a subclass of hpctrain.training.strategies.strategy.Strategy" in printed
    )


@pytest.mark.parametrize(
    ("devices", "num_gpus", "busy", "expected"),
    [
        (2, 4, [], [0, 1]),
        ([1, 3], 4, [1], [1, 3]),
        ("1,3", 4, [], [1, 3]),
        (-1, 4, [2], [0, 1, 2, 3]),
        ("auto", 4, [0, 2], [1, 3]),
        ("auto", 0, [], [None]),
        (3, 0, [], [None, None, None]),
    ],
)
def test_devices_are_chosen(devices, num_gpus, busy, expected):
    assert choose_devices(devices, num_gpus, busy) == expected


@pytest.mark.parametrize(
    ("devices", "num_gpus", "busy", "message"),
    [
        (0, 4, [], "must be a number of devices"),
        ("all", 4, [], "must be a number of devices"),
        ([1, 1], 4, [], "lists a device more than once"),
        ([4], 4, [], "the last visible GPU has index 3"),
        ([0], 0, [], "no GPU is visible"),
        (3, 4, [0, 1], "use 2 of the 4 visible GPUs"),
        (3, 2, [], "the number of visible GPUs is 2"),
        ("auto", 2, [0, 1], "other processes use 2 of the 2 visible GPUs"),
    ],
)
def test_unavailable_devices_are_refused(devices, num_gpus, busy, message):
    with pytest.raises(UserError, match=message):
        choose_devices(devices, num_gpus, busy)


class TwoGpus(FakeDriver):
    """Two whole GPUs: this process computes on the first; another one computes on the second as well."""

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:  # noqa: N802
        return [0, 0]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        pids = {"GPU-a": [os.getpid()], "GPU-b": [os.getpid(), 1]}[handle]
        return [SimpleNamespace(pid=pid) for pid in pids]


@pytest.mark.parametrize("devices", [1, "auto"])
def test_own_process_does_not_make_a_gpu_busy(devices, monkeypatch):
    install_fake_driver(monkeypatch, TwoGpus())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_devices(devices, {}) == [0]


def create_trainers() -> list[str]:
    """Return the number of ranks of two trainings, and the errors of calls that differ from the launch."""
    results = []
    for call in ({"num_nodes": 1, "devices": 2, "accelerator": "cpu"}, {"devices": -1}):
        trainer = hpctrain.Trainer(max_steps=1, **call)
        trainer.fit(Blocks(), samples())
        results.append(str(trainer.ranks.world_size))
    for call in ({"devices": 5}, {"devices": "1,"}, {"num_nodes": 2}):
        with pytest.raises(UserError) as caught:
            hpctrain.Trainer(max_steps=1, **call)
        results.append(str(caught.value))
    torch.cuda.is_available = lambda: True
    for gpus in (2, [0, 1], "0, 1", -1):
        hpctrain.Trainer(max_steps=1, gpus=gpus)
    for gpus in (1, "3", [0, 1, 2]):
        with pytest.raises(UserError) as caught:
            hpctrain.Trainer(max_steps=1, gpus=gpus)
        results.append(str(caught.value))
    os.environ["HPCTRAIN_ATTEMPT"] = "1"  # a restart may have fewer ranks
    hpctrain.Trainer(max_steps=1, num_nodes=3, devices=8)
    return results


@pytest.mark.ranks
def test_devices_and_nodes_are_those_of_the_launcher():
    results, _ = run_on_ranks(create_trainers, group=False)
    assert results[:2] == ["2", "2"]
    assert "devices=5, but the launcher started 2 ranks on this node (LOCAL_WORLD_SIZE)" in results[2]
    assert "devices='1,', but the launcher started 2 ranks" in results[3]
    assert "num_nodes=2, but the number of nodes is 1 (" in results[4]
    for gpus, message in zip(("1", "'3'", "[0, 1, 2]"), results[5:], strict=True):
        assert f"gpus={gpus}, but the launcher started 2 ranks on this node" in message


def test_nodes_and_gpus_that_do_not_exist_are_refused():
    with pytest.raises(UserError, match=r"num_nodes=2, .* without a launcher, .* `hpctrain submit --nodes 2"):
        hpctrain.Trainer(max_steps=1, num_nodes=2)
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for call, name in (({"gpus": 1}, "gpus=1"), ({"accelerator": "gpu"}, "accelerator='gpu'")):
        with pytest.raises(UserError, match=f"{name} requires a GPU, but PyTorch .* finds none"):
            hpctrain.Trainer(max_steps=1, **call)


class Thawing(hpctrain.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 1)
        self.first.requires_grad_(False)

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            self.first.requires_grad_(True)
        return self.second(self.first(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("zero1", marks=pytest.mark.extended)])
@pytest.mark.ranks
@on_ranks(group=False)
def test_parameters_that_are_trained_only_later_are_refused(strategy):
    trainer = hpctrain.Trainer(max_steps=4, global_batch_size=4, strategy=strategy, checkpoint_every=None)
    with pytest.raises(hpctrain.UserError, match=r"first\.weight was frozen when training began"):
        trainer.fit(Thawing(), torch.ones(32, 2))


class NormAfterStages(hpctrain.Module):
    def __init__(self, *, counts_tokens: bool = False):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
        self.norm = nn.BatchNorm1d(2)
        self.counts_tokens = counts_tokens

    def training_step(self, batch, batch_idx):
        return self.norm(self.net(batch))

    def training_step_end(self, outputs):
        loss = outputs.sum(1).square().mean()
        return {"loss": loss, "num_tokens": torch.tensor(3)} if self.counts_tokens else loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_norm(strategy: str, counts_tokens: bool) -> list[float]:
    module = NormAfterStages(counts_tokens=counts_tokens)
    settings = {"global_batch_size": 8, "micro_batch_size": 4, "strategy": strategy}
    hpctrain.Trainer(max_steps=3, checkpoint_every=None, **settings).fit(module, torch.randn(32, 2))
    return module.norm.running_mean.tolist()


@pytest.mark.ranks
def test_buffers_outside_the_stages_are_those_of_the_last_rank():
    first, last = run_on_ranks(train_norm, "pipeline", False, group=False)
    assert first == last != [0.0, 0.0]


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp2", "pipeline"])
def test_means_over_tokens_are_refused_with_losses_of_samples(strategy):
    with pytest.raises(AssertionError, match=f"'{strategy}' averages the loss over samples, not tokens"):
        run_on_ranks(train_norm, strategy, True, group=False)
