"""Checkpoints that several ranks save and load together; call these functions on each rank."""

from pathlib import Path

import torch
import torch.distributed as dist

from hpctrain.checkpoint.store import CheckpointStore, CommittedSave


def state(step: int) -> dict:
    """3 MB in total, two thirds of it in one tensor, which several ranks must split."""
    big = torch.arange(512 * 1024, dtype=torch.float32).reshape(512, 1024) + step
    return {
        "big": big,
        "small": [torch.full((100, 100), float(step + i)) for i in range(25)],
        "lr": 0.1 * step,
    }


def rank_state() -> dict[str, torch.Tensor]:
    return {"rng": torch.tensor([dist.get_rank(), 7])}


def open_store(folder: Path, node: str | None = None, **options: object) -> CheckpointStore:
    """Open a store in `folder`; with `node`, its second tier is private to that node."""
    if node is None:
        return CheckpointStore(folder, dist.group.WORLD, **options)
    tier = folder / node
    if not tier.exists():
        tier.mkdir(parents=True, exist_ok=True)
    return CheckpointStore(shared_folder(folder), dist.group.WORLD, second_tier=tier, **options)


def shared_folder(folder: Path) -> Path:
    return folder / "shared" / "run" / "checkpoints"


def save(store: CheckpointStore, step: int) -> CommittedSave:
    return store.save(step, state(step), rank_state())


def begin(store: CheckpointStore, step: int) -> None:
    store.async_save(step, state(step), rank_state())


def assert_loads(store: CheckpointStore, step: int, *, same_ranks: bool = True) -> None:
    """Fail unless the newest checkpoint is that of `step`; other ranks get no rank state."""
    loaded, broken = store.load_newest()
    assert loaded is not None, broken
    assert loaded.step == step, (loaded, broken)
    assert torch.equal(loaded.state["big"], state(step)["big"])
    assert all(map(torch.equal, loaded.state["small"], state(step)["small"]))
    if same_ranks:
        assert loaded.rank_state["rng"].tolist() == [dist.get_rank(), 7]
    else:
        assert loaded.rank_state is None
