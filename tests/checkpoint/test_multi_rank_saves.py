"""Saves by several ranks: each writes its share, and all report the same error."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from helpers.rank_checkpoints import assert_loads, begin, open_store, save, state
from helpers.ranks import run_on_ranks
from torch.distributed._shard import sharded_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hpctrain.checkpoint import store as store_module
from hpctrain.checkpoint.io import background_io
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import CheckpointError

pytestmark = [
    pytest.mark.ranks,
    # torch warns that it loads without peers, as intended here.
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
]


def error_of(action: Callable[[], object]) -> str:
    """Return the message of the CheckpointError that an action raises."""
    with pytest.raises(CheckpointError) as error:
        action()
    return str(error.value)


def assert_same(messages: list[str], *parts: str) -> None:
    """Fail unless all ranks got the same message with these parts."""
    assert len(set(messages)) == 1, messages
    assert all(word in messages[0] for word in parts), messages[0]


def list_step_folders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def hold_writing(*, ignore_stop: bool = False) -> Callable[[], None]:
    """Block writes until they are stopped; with `ignore_stop`, until the returned function is called."""
    released, write = threading.Event(), background_io.FileWriter._write

    def slow(writing, part):
        while not released.is_set() and (ignore_stop or not writing.stop.is_set()):
            time.sleep(0.01)
            writing.last_progress = writing.last_progress if ignore_stop else time.monotonic()
        return write(writing, part)

    def release() -> None:
        released.set()
        background_io.FileWriter._write = write

    background_io.FileWriter._write = slow
    return release


def save_both_ways(folder: Path) -> tuple:
    store = open_store(folder)
    saved = save(store, 5)
    begin(store, 6)
    assert store.wait(120)
    assert [saved.step for saved in store.collect_outcomes()] == [6]
    assert_loads(store, 6)
    return saved.step, saved.path, saved.total_bytes


def test_checkpoint_of_three_ranks_loads_on_other_numbers_and_with_dcp(tmp_path):
    assert len(set(run_on_ranks(save_both_ways, tmp_path, world_size=3))) == 1
    folder = tmp_path / "step-00000006"
    sizes = [path.stat().st_size for path in folder.glob("*.distcp")]
    assert len(sizes) == 3
    assert max(sizes) < 1.1 * min(sizes)
    loaded = CheckpointStore(tmp_path).load_newest()[0]
    assert torch.equal(loaded.state["big"], state(6)["big"])
    target = {"state/big": torch.empty(512, 1024), "rank-00002/rng": torch.empty(2, dtype=torch.int64)}
    dcp.load(target, checkpoint_id=folder)
    assert torch.equal(target["state/big"], state(6)["big"])
    assert target["rank-00002/rng"].tolist() == [2, 7]


def load_around_broken_files(folder: Path, victims: list[str]) -> list[list[str]]:
    store, reports = open_store(folder, retention=Retention(last=10)), []
    save(store, 1)
    for step, victim in enumerate(victims, 2):
        path = save(store, step).path / victim
        if dist.get_rank() == 0:
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        dist.barrier()
        loaded, broken = store.load_newest()
        assert loaded.step == 1
        reports.append(broken)
    return reports


def test_corrupt_file_of_one_rank_is_skipped_by_all(tmp_path):
    """Ranks verify different files."""
    victims = ["__0_0.distcp", "__1_0.distcp", "state.json", "manifest.json"]
    reports, others = run_on_ranks(load_around_broken_files, tmp_path, victims)
    assert reports == others
    for victim, (report,) in zip(victims, reports, strict=True):
        assert victim in report


def save_on_full_disk_of_rank_1(folder: Path) -> str:
    store = open_store(folder)
    save(store, 1)
    write = background_io.FileWriter._write

    def full(writing, part):
        raise OSError(122, "Disk quota exceeded", part.name)

    if dist.get_rank() == 1:
        background_io.FileWriter._write = full
    error = error_of(lambda: save(store, 2))
    background_io.FileWriter._write = write
    dist.barrier()
    assert list_step_folders(folder) == ["step-00000001"]
    save(store, 3)
    assert_loads(store, 3)
    return error


def test_full_disk_of_one_rank_is_reported_by_all(tmp_path):
    assert_same(run_on_ranks(save_on_full_disk_of_rank_1, tmp_path), "Disk quota exceeded", "(rank 1)")


def save_different_states(folder: Path) -> list[str]:
    rank, store = dist.get_rank(), open_store(folder)
    errors = [
        error_of(lambda: store.save(1, {"x": torch.zeros(3 + rank)}, {})),
        error_of(lambda: store.save(1 + rank, {"x": torch.zeros(3)}, {})),
        error_of(lambda: store.save(1, {"x": object() if rank == 1 else torch.zeros(3)}, {})),
    ]
    save(store, 2)
    return errors


def test_differing_states_are_reported_by_all_ranks(tmp_path):
    shapes, steps, types = zip(*run_on_ranks(save_different_states, tmp_path), strict=True)
    assert_same(shapes, "shapes of this rank's tensors", "(rank 1)")
    assert all("is saving step 2, but rank 0 is saving step 1" in message for message in steps), steps
    assert_same(types, "builtins.object", "(rank 1)")


def save_while_rank_1_dies(folder: Path) -> tuple[str, str]:
    store = open_store(folder)
    save(store, 1)
    if dist.get_rank() == 1:
        hold_writing()
    begin(store, 2)
    if dist.get_rank() == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    assert store.wait(120)
    (outcome,) = store.collect_outcomes()
    return str(outcome), error_of(lambda: save(store, 3))


def test_death_of_one_rank_fails_the_save_without_commit(tmp_path):
    (during, after), _ = run_on_ranks(save_while_rank_1_dies, tmp_path, killed=[1])
    assert "lost their connection" in during
    assert "checkpoint of step 2" in during
    assert "lost their connection" in after
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000001"]


def save_while_rank_1_is_stopped(folder: Path) -> tuple[str, bool]:
    store_module._MARGIN_S = 1.0
    store = open_store(folder, patience_s=1.0)
    if dist.get_rank() == 1:
        hold_writing()
    begin(store, 1)
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    assert store.wait(120)
    committed = list(folder.glob("step-*")) != []
    (outcome,) = store.collect_outcomes()
    os.kill(pids[1], signal.SIGCONT)
    return str(outcome), committed


def test_stopped_rank_fails_the_save_after_the_limit(tmp_path):
    (error, committed), (error_of_1, _) = run_on_ranks(save_while_rank_1_is_stopped, tmp_path)
    assert "limit of 2 s" in error
    assert "limit of 2 s" in error_of_1
    assert not committed


def save_while_disk_of_rank_1_hangs(folder: Path) -> list[str]:
    store = open_store(folder, patience_s=1.5)
    if dist.get_rank() == 1:
        release = hold_writing(ignore_stop=True)
    errors = [error_of(lambda: save(store, 1)), error_of(lambda: save(store, 2))]
    if dist.get_rank() == 1:
        release()
        store._writer.ended.wait(120)
    dist.barrier()
    save(store, 3)
    assert_loads(store, 3)
    return errors


def test_hanging_disk_of_one_rank_is_reported_by_all_until_it_recovers(tmp_path):
    first, second = zip(*run_on_ranks(save_while_disk_of_rank_1_hangs, tmp_path), strict=True)
    assert_same(first, "has not made progress for 1.5 s", "(rank 1)")
    assert_same(second, "an earlier save is still waiting for the disk", "(rank 1)")


PLACEMENTS = {
    "rows": (Replicate(), Shard(0)),
    "columns": (Shard(1), Replicate()),
    "both": (Shard(0), Shard(1)),
    "replicated": (Replicate(), Replicate()),
}


def matrix(step: int) -> torch.Tensor:
    return torch.arange(7 * 6, dtype=torch.float64).reshape(7, 6) + step


def make_table() -> sharded_tensor.ShardedTensor:
    """Twelve numbered rows, the same number on every rank."""
    rank, rows = dist.get_rank(), 12 // dist.get_world_size()
    local = torch.arange(rank * rows * 4, (rank + 1) * rows * 4, dtype=torch.float64).reshape(rows, 4)
    shard = sharded_tensor.Shard.from_tensor_and_offsets(local, [rank * rows, 0], rank)
    return sharded_tensor.init_from_local_shards([shard], 12, 4)


def assert_table_loaded(table: sharded_tensor.ShardedTensor) -> None:
    assert torch.equal(table.local_shards()[0].tensor, make_table().local_shards()[0].tensor)


def save_and_load_sharded(folder: Path) -> None:
    """On a 2 × 2 mesh: sharded, uneven, replicated in one dimension, and sharded in both."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    tree = {name: distribute_tensor(matrix(1), mesh, placement) for name, placement in PLACEMENTS.items()}
    tree["plain"], tree["table"] = matrix(2), make_table()
    store = open_store(folder)
    store.save(1, tree, {})
    loaded = open_store(folder).load_newest(like=tree)[0].state
    for name, placement in PLACEMENTS.items():
        assert loaded[name].placements == placement
        assert torch.equal(loaded[name].to_local(), tree[name].to_local()), name
    assert torch.equal(loaded["plain"], matrix(2))
    assert_table_loaded(loaded["table"])
    other = {
        name: distribute_tensor(torch.zeros(7, 6).double(), mesh, (Shard(1), Shard(0))) for name in PLACEMENTS
    }
    resharded = store.load_newest(like=other)[0].state
    for name in PLACEMENTS:
        assert torch.equal(resharded[name].full_tensor(), matrix(1)), name


def load_resharded(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    like = {"rows": distribute_tensor(torch.zeros(7, 6).double(), mesh, [Shard(1)]), "table": make_table()}
    loaded = open_store(folder).load_newest(like=like)[0].state
    assert_table_loaded(loaded["table"])
    assert torch.equal(loaded["rows"].full_tensor(), matrix(1))
    assert torch.equal(loaded["both"], matrix(1))


def test_distributed_tensors_load_with_other_placements_and_ranks(tmp_path):
    run_on_ranks(save_and_load_sharded, tmp_path, world_size=4)
    run_on_ranks(load_resharded, tmp_path, world_size=3)
    target = {"state/both": torch.empty(7, 6, dtype=torch.float64)}
    dcp.load(target, checkpoint_id=tmp_path / "step-00000001")
    assert torch.equal(target["state/both"], CheckpointStore(tmp_path).load_newest()[0].state["both"])
