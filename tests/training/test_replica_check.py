"""Comparison of the replicas: flipped bits are detected in time, and equal replicas never are."""

import os
import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from helpers.ranks import run_on_ranks
from torch import nn

import hpctrain
from hpctrain.cluster import detect
from hpctrain.errors import SilentCorruption
from hpctrain.runtime.distributed_context import DistributedContext, init_distributed
from hpctrain.training import replica_check
from hpctrain.training.replica_check import ReplicaCheck

EVERY = 5


class State(SimpleNamespace):
    """The part of the training state that is compared."""

    @property
    def verified_step(self) -> int | None:
        return self.compared_step


def make_state(dtype=torch.float32, seed=1):
    """A model with parameters of all layouts, and the state of an optimizer after a step."""
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Linear(40, 60), nn.Linear(60, 7, dtype=dtype), nn.Conv2d(2, 3, 3), nn.BatchNorm1d(3)
    )
    module[2].to(memory_format=torch.channels_last)
    module.odd = nn.Parameter(torch.randn(9, 5).t()[:3])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    state = State(module=module, optimizers=[optimizer], step=0, compared_step=None)
    train(state)
    return state


def train(state) -> None:
    """An update that is the same on all ranks."""
    generator = torch.Generator().manual_seed(state.step)
    for parameter in state.module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    state.optimizers[0].step()
    state.step += 1


def flip(tensor: torch.Tensor, chance: random.Random) -> None:
    """Flip a random bit of a tensor."""
    at = tuple(chance.randrange(size) for size in tensor.shape)
    kind = torch.int16 if tensor.element_size() == 2 else torch.int32
    bits = tensor[at].reshape(1).view(kind)
    bit = chance.randrange(8 * tensor.element_size())
    value = int(bits) ^ (1 << bit if bit < 8 * tensor.element_size() - 1 else -(1 << bit))
    with torch.no_grad():
        tensor[at] = torch.tensor([value], dtype=kind).view(tensor.dtype)[0]


def tensors_of(state) -> list[torch.Tensor]:
    own = [each.data for each in state.module.parameters()]
    return own + [each for one in state.optimizers[0].state.values() for each in one.values()]


def exchange(check: ReplicaCheck, context: DistributedContext) -> None:
    sums = torch.tensor(check.message(), dtype=torch.float64)
    dist.all_reduce(sums, group=context.cpu_group)
    check.verify(sums.tolist())


def flips_are_found(first: int, last: int) -> dict[str, int]:
    """Flip a bit in each of many trainings; each flip must be detected, or have no effect anymore."""
    context = init_distributed(detect(os.environ), os.environ)
    counts = {"found": 0, "healed": 0}
    for seed in range(first, last):
        chance = random.Random(seed)
        state = make_state(chance.choice([torch.float32, torch.bfloat16]), seed)
        check = ReplicaCheck(context, state, EVERY)
        check.reset()
        odd, at = chance.randrange(context.ranks.world_size), chance.randrange(2, 2 * EVERY)
        error = None
        while error is None and state.step < at + 2 * EVERY:
            train(state)
            if state.step == at:
                # All ranks draw the same numbers, but only one uses them.
                # Adam fails with a negative number of steps.
                tensor = chance.choice([each for each in tensors_of(state) if each.dim()])
                flip(tensor if context.ranks.rank == odd else tensor.clone(), chance)
            check.add(state.step, whole=False)
            try:
                exchange(check, context)
            except SilentCorruption as caught:
                error = caught
        errors = context.all_gather(str(error))
        assert len(set(errors)) == 1, errors
        if error is None:
            sums = [tensor.double().sum().item() for tensor in tensors_of(state)]
            assert all(other == sums for other in context.all_gather(sums)), f"seed {seed} was not found"
            counts["healed"] += 1
        else:
            assert [each.rank for each in error.suspects] == [odd], (seed, error)
            assert at <= state.step <= at + EVERY, (seed, at, state.step)
            assert error.verified_step < at
            counts["found"] += 1
    return counts


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.slow
def test_flipped_bits_are_found_within_the_interval_on_the_right_rank():
    first, *others = run_on_ranks(_with_small_slices, flips_are_found, 0, 100, world_size=3)
    assert others == [first, first]
    assert first["found"] >= 95


def _with_small_slices(function, *arguments):
    replica_check._MIN_SLICE_BYTES = {"cpu": 2048}
    return function(*arguments)


def finds_the_difference(odd: list[int], message: str) -> list[int]:
    """Flip the same bit on the `odd` ranks, after every slice was equal once."""
    context = init_distributed(detect(os.environ), os.environ)
    state = make_state()
    check = ReplicaCheck(context, state, EVERY)
    check.reset()
    for step in range(2, 8):
        train(state)
        if step == 7 and context.ranks.rank in odd:
            flip(state.optimizers[0].state[state.module[0].weight]["exp_avg"], random.Random(3))
        check.add(step, whole=step in (5, 7))
        if step < 7:
            exchange(check, context)
    with pytest.raises(SilentCorruption, match=message) as caught:
        exchange(check, context)
    assert caught.value.verified_step == 5
    return [each.rank for each in caught.value.suspects]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("odd", "message", "suspects"),
    [
        ([2], r"exp_avg of 0.weight differed .* step 5\. 3 of 4 ranks .* rank 2 \(CPU of rank 2 on ", [2]),
        ([0], r"3 of 4 ranks agree, all except rank 0 .* step 5 or an earlier one", [0]),
        ([0, 3], "There is no majority", [0, 1, 2, 3]),
    ],
)
def test_the_majority_names_the_odd_rank(odd, message, suspects):
    assert run_on_ranks(finds_the_difference, odd, message, world_size=4) == [suspects] * 4


def test_the_hash_of_a_gpu_depends_on_every_bit_and_on_the_order(monkeypatch):
    monkeypatch.setattr(replica_check, "_BLOCK_SIZE", 200)
    check = ReplicaCheck(SimpleNamespace(device=torch.device("cpu")), make_state(), 1)
    parts = [torch.randint(-99, 99, (size,), dtype=torch.int32) for size in (150, 60, 7, 200)]
    parts.append(torch.randint(-99, 99, (33,), dtype=torch.int16))

    def pieces() -> tuple[float, ...]:
        total = replica_check._combine([5, *check._hash_on_device(parts)])
        check._hash = lambda _: total
        check.add(1, whole=True)
        (numbers,) = check.message()
        return tuple(numbers.tolist())

    check.reset()
    seen = {pieces()}
    low, high, low_squares, high_squares = next(iter(seen))
    assert 0 <= min(low, high) <= max(low, high) < 2**16
    assert (low_squares, high_squares) == (low**2, high**2)
    chance = random.Random(1)
    for _ in range(200):
        part = chance.choice(parts)
        flip(part, chance)
        seen.add(pieces())
    parts[0][:2] = parts[0][:2].flip(0)
    seen.add(pieces())
    parts[:2] = parts[1::-1]
    seen.add(pieces())
    assert len(seen) == 203


class Net(hpctrain.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return self.net(batch).pow(2).mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4)]


def fits(run_dir, *settings: dict) -> None:
    for number, options in enumerate(settings):
        trainer = hpctrain.Trainer(
            global_batch_size=12, run_dir=run_dir and run_dir / str(number),
            **{"seed": 3, "max_steps": 40, "replica_check_every": 3, "checkpoint_every": 10, **options},
        )  # fmt: skip
        trainer.fit(Net(), list(torch.randn(512, 3, generator=torch.Generator().manual_seed(5))))


@pytest.mark.extended
@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.long)])
def test_trainings_have_no_false_alarm(tmp_path, half):
    settings = [{"algorithm": name} for name in ("powersgd", "bytegrad", "local_sgd")]
    settings += [{"strategy": name} for name in ("ddp2", "zero1", "fsdp")]
    settings += [
        {"gradient_clip_norm": 0.1, "micro_batch_size": 2},
        {"precision": "bf16-true"},
        {"on_bad_loss": "skip"},
        {"elastic_determinism": True, "grain_size": 2},
    ]
    run_on_ranks(fits, tmp_path, *settings[half::2], world_size=3, timeout=100.0)


def test_the_check_is_off_without_replicas_and_on_different_hardware(monkeypatch):
    ranks = SimpleNamespace(world_size=2)
    context = SimpleNamespace(ranks=ranks, is_distributed=True, device=torch.device("cpu"))
    context.all_gather = lambda value: [value, value]
    strategy = SimpleNamespace(has_equal_replicas=True)
    check, remark = ReplicaCheck.for_training(context, make_state(), strategy, 10)
    assert check is not None
    assert remark is None
    assert ReplicaCheck.for_training(context, make_state(), strategy, None) == (None, None)
    context.all_gather = lambda value: [value, "x86_64 with NEON and 1 thread"]
    check, remark = ReplicaCheck.for_training(context, make_state(), strategy, 10)
    assert check is None
    assert "different hardware" in remark
    assert "NEON" in remark
    strategy.has_equal_replicas = False
    assert ReplicaCheck.for_training(context, make_state(), strategy, 10) == (None, None)
