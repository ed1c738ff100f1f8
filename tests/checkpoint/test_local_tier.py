"""Checkpoints saved to the local tier first and copied to the shared folder."""

import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import rank_checkpoints
from helpers.ranks import on_ranks, run_on_ranks
from helpers.saved_states import names, steps

from hpctrain.checkpoint.io import background_io
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore, CommittedSave


def open_on_node(folder: Path, node: int | str) -> CheckpointStore:
    return rank_checkpoints.open_store(folder, f"node-{node}")


@contextmanager
def failing_copies(folder: Path) -> Iterator[None]:
    """Keep saves in the local tier: a file is in the place of the shared folder."""
    shared = rank_checkpoints.shared_folder(folder)
    if dist.get_rank() == 0:
        shared.rename(folder / "aside")
        shared.write_text("in the way")
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        shared.unlink()
        (folder / "aside").rename(shared)
    dist.barrier()


@pytest.mark.ranks
@on_ranks()
def test_each_rank_saves_to_its_node_and_parts_are_copied(tmp_path):
    rank = dist.get_rank()
    store, copied = open_on_node(tmp_path, rank), []
    for step in (1, 2):
        rank_checkpoints.begin(store, step)
        assert store.wait(120)
        outcomes = store.collect_outcomes()
        copied += [outcome for outcome in outcomes if "shared" in outcome.path.parts]
        (saved,) = (outcome for outcome in outcomes if "shared" not in outcome.path.parts)
        assert (saved.step, saved.path.parent.parent) == (step, tmp_path / f"node-{rank}")
        assert [path.name for path in saved.path.glob("*.distcp")] == [f"__{rank}_0.distcp"]
    assert store.close(clean=True) == []
    copied += store.collect_outcomes()
    assert copied[-1].path == rank_checkpoints.shared_folder(tmp_path) / "step-00000002"
    assert list((tmp_path / f"node-{rank}").iterdir()) == []
    rank_checkpoints.assert_loads(open_on_node(tmp_path, rank), 2)


@pytest.mark.ranks
@on_ranks()
def test_local_tier_is_unused_when_one_node_lacks_it(tmp_path):
    if dist.get_rank() == 1:
        (tmp_path / "node-1").write_text("no folder")
    store = open_on_node(tmp_path, dist.get_rank())
    rank_checkpoints.begin(store, 1)
    assert store.wait(120)
    (saved,) = store.collect_outcomes()
    assert saved.path == rank_checkpoints.shared_folder(tmp_path) / "step-00000001"
    assert "local_checkpoints" in saved.notes[0]
    assert "cannot be used" in saved.notes[0]


def save_step_2_on_nodes_only(folder: Path) -> None:
    """As after a kill before step 2 was copied; step 1 is shared."""
    rank = dist.get_rank()
    store = open_on_node(folder, rank)
    rank_checkpoints.save(store, 1)
    with failing_copies(folder):
        rank_checkpoints.begin(store, 2)
        assert store.wait(120)
        assert store.close() == []
    # The copy may fail before the save is reported.
    failed, saved = sorted(store.collect_outcomes(), key=lambda outcome: isinstance(outcome, CommittedSave))
    assert (saved.step, saved.path.parent.parent) == (2, folder / f"node-{rank}")
    assert "step 2 was not written" in str(failed)


@pytest.fixture(scope="module")
def nodes_with_step_2(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tier") / "first"
    run_on_ranks(save_step_2_on_nodes_only, folder)
    return folder


@pytest.fixture
def nodes(nodes_with_step_2, tmp_path) -> Iterator[Path]:
    """A copy of `nodes_with_step_2` at the same path, because the tier derives the run's folder from it."""
    original = nodes_with_step_2.rename(nodes_with_step_2.with_name("original"))
    shutil.copytree(original, nodes_with_step_2)
    yield nodes_with_step_2
    shutil.rmtree(nodes_with_step_2)
    original.rename(nodes_with_step_2)


@pytest.mark.ranks
@on_ranks()
def test_drain_copies_checkpoints_from_nodes(nodes):
    rank = dist.get_rank()
    assert open_on_node(nodes, rank).drain(30.0) == []
    assert list((nodes / f"node-{rank}").iterdir()) == []
    rank_checkpoints.assert_loads(rank_checkpoints.open_store(rank_checkpoints.shared_folder(nodes)), 2)


def load_on_the_next_node_and_save(folder: Path) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = open_on_node(folder, (rank + 1) % world_size)
    rank_checkpoints.assert_loads(store, 2, same_ranks=world_size == 2)
    assert (rank_checkpoints.shared_folder(folder) / "step-00000002" / "manifest.json").exists()
    rank_checkpoints.begin(store, 3)
    assert store.close() == []
    rank_checkpoints.assert_loads(store, 3)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_restart_with_swapped_nodes_joins_their_parts(nodes, world_size):
    run_on_ranks(load_on_the_next_node_and_save, nodes, world_size=world_size)


@pytest.mark.ranks
@on_ranks()
def test_restart_without_a_node_loads_shared_checkpoint(nodes):
    store = open_on_node(nodes, ["0", "new"][dist.get_rank()])
    loaded, broken = store.load_newest()
    assert loaded.step == 1
    (report,) = broken
    assert "has a complete copy of __1_0.distcp" in report
    for step in (2, 3):
        rank_checkpoints.begin(store, step)
    assert store.close() == []
    rank_checkpoints.assert_loads(store, 3)


def state(step: int) -> dict:
    return {"x": torch.full((1000,), float(step))}


@pytest.fixture
def tier(tmp_path) -> Path:
    """An existing folder for the local tier."""
    folder = tmp_path / "tier"
    folder.mkdir()
    return folder


@pytest.fixture
def slow_copying(monkeypatch) -> threading.Event:
    """Make copies to the shared folder wait until this event is set."""
    released = threading.Event()
    file_copy_write = background_io.file_copy_write

    def delayed_copy(path):
        part = file_copy_write(path)

        def wait_and_read():
            assert released.wait(120)
            yield from part.blocks()

        return background_io.FileWrite(part.name, wait_and_read)

    monkeypatch.setattr("hpctrain.checkpoint.tier.local_tier.file_copy_write", delayed_copy)
    return released


@pytest.mark.parametrize(
    ("retention", "copied"), [(Retention(), [1, 8]), (Retention(last=1, every=3), [1, 3, 6, 8])]
)
def test_slow_copies_skip_all_but_permanent_and_the_newest(tmp_path, tier, slow_copying, retention, copied):
    """The tier stays small."""
    store = CheckpointStore(tmp_path / "run" / "checkpoints", retention=retention, second_tier=tier)
    for step in range(1, 9):
        store.async_save(step, state(step), {})
    assert store.wait(120)
    assert [saved.step for saved in store.collect_outcomes()] == list(range(1, 9))
    (run_tier,) = tier.iterdir()
    assert steps(run_tier) == copied
    slow_copying.set()
    store.close()
    assert [saved.step for saved in store.collect_outcomes()] == copied
    assert steps(tmp_path / "run" / "checkpoints") == [
        step for step in copied if step > 1 or retention.last > 1
    ]


def test_save_goes_directly_to_shared_folder_when_tier_is_full(tmp_path, tier, monkeypatch):
    disk_usage = shutil._ntuple_diskusage(20_000, 0, 20_000)
    monkeypatch.setattr("hpctrain.checkpoint.tier.local_tier.shutil.disk_usage", lambda _: disk_usage)
    store = CheckpointStore(tmp_path / "run" / "checkpoints", second_tier=tier)
    store.async_save(1, state(1), {})
    store.async_save(2, {"x": torch.zeros(3000)}, {})
    store.close()
    outcomes = {(saved.step, saved.path.parent.name): saved for saved in store.collect_outcomes()}
    assert (1, "checkpoints") in outcomes
    direct = outcomes[2, "checkpoints"]
    assert "has no space for" in direct.notes[0]
    assert "directly" in direct.notes[0]
    assert steps(tmp_path / "run" / "checkpoints") == [1, 2]


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        (lambda folder: folder.chmod(0o750), "has mode 0750, not 0700: other users can access it. Remove"),
        (lambda folder: folder.parent.chmod(0o777), "can be replaced by any user: .* Set the sticky bit"),
    ],
)
def test_tier_open_to_other_users_is_refused(tmp_path, tier, attack, message):
    checkpoints = tmp_path / "run" / "checkpoints"
    first = CheckpointStore(checkpoints, second_tier=tier)
    (folder,) = tier.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    first.close()
    attack(folder)
    store = CheckpointStore(checkpoints, second_tier=tier)
    store.async_save(2, state(2), {})
    store.close()
    (saved,) = store.collect_outcomes()
    assert saved.path.parent == checkpoints
    assert re.search(f"{folder} {message}(.|\n)*directly", saved.notes[0])
    assert list(folder.iterdir()) == []


def test_two_runs_share_a_tier_without_collision(tmp_path, tier):
    runs = [
        CheckpointStore(tmp_path / parent / "run" / "checkpoints", second_tier=tier) for parent in ("a", "b")
    ]
    for number, store in enumerate(runs, 1):
        store.async_save(number, state(number), {})
        store.close()
    assert len(names(tier)) == 2
    for number, store in enumerate(runs, 1):
        assert store.load_newest()[0].step == number


def test_tier_with_uncopied_checkpoint_is_not_cleaned(tmp_path, tier):
    shared = tmp_path / "run" / "checkpoints"
    shared.parent.mkdir()
    shared.write_text("in the way")
    store = CheckpointStore(shared, second_tier=tier)
    store.async_save(1, state(1), {})
    (sentence,) = store.close(clean=True)
    assert "Step 1 exists only in" in sentence
    shared.unlink()
    reopened = CheckpointStore(shared, second_tier=tier)
    assert torch.equal(reopened.load_newest()[0].state["x"], state(1)["x"])
    reopened.close(clean=True)
    assert steps(shared) == [1]
    assert names(tier) == []
