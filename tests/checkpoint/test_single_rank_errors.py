"""Errors on one rank: all ranks report the same error, and none waits forever."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import rank_checkpoints
from helpers.ranks import on_ranks, run_on_ranks
from helpers.saved_states import steps

from hpctrain.checkpoint.io import checkpoint_dir
from hpctrain.checkpoint.store import CheckpointStore, CommittedSave
from hpctrain.checkpoint.tier.local_tier import LocalTier
from hpctrain.errors import CheckpointError

pytestmark = pytest.mark.ranks


def make_unreadable(path: Path) -> None:
    """Replace a folder by a link to itself."""
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(path.name)


def fail_to_read(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def open_on_own_node(folder: Path) -> CheckpointStore:
    return rank_checkpoints.open_store(folder, f"node-{dist.get_rank()}")


def save_in_background(store: CheckpointStore, step: int) -> list[object]:
    """Save within the time that a rank may delay the others."""
    rank_checkpoints.begin(store, step)
    assert store.wait(120)
    return list(store.collect_outcomes())


def load_error(store: CheckpointStore) -> str:
    with pytest.raises(CheckpointError) as error:
        store.load_newest()
    return str(error.value)


def load_from_unreadable_folder(folder: Path) -> str:
    store = rank_checkpoints.open_store(folder / "checkpoints")
    if dist.get_rank() == 0:
        make_unreadable(folder / "checkpoints")
    dist.barrier()
    return load_error(store)


def test_unreadable_folder_is_reported_by_all_ranks(tmp_path):
    """Only rank 0 reads it."""
    message, other = run_on_ranks(load_from_unreadable_folder, tmp_path, timeout=40)
    assert message == other
    assert "Too many levels of symbolic links" in message
    assert "(rank 0)" in message


@on_ranks(timeout=40)
def test_tier_lost_between_saves_is_replaced_by_shared_folder(tmp_path):
    store = open_on_own_node(tmp_path)
    assert save_in_background(store, 1)
    if dist.get_rank() == 1:
        make_unreadable(store._tier.target.directory.folder)
    dist.barrier()
    for step in (2, 3):
        outcomes = save_in_background(store, step)
        (saved,) = (
            outcome for outcome in outcomes if isinstance(outcome, CommittedSave) and outcome.step == step
        )
        assert saved.path.parent.name == "checkpoints"
        assert "is a symbolic link, not a folder" in saved.notes[0]
    rank_checkpoints.assert_loads(rank_checkpoints.open_store(rank_checkpoints.shared_folder(tmp_path)), 3)


def wait_for_copies(store: CheckpointStore) -> None:
    store._tier._thread.join(120)
    assert not store._tier._thread.is_alive()


@on_ranks(timeout=40)
def test_step_after_failed_copy_is_copied(tmp_path):
    store = open_on_own_node(tmp_path)
    large_files = LocalTier._large_files
    if dist.get_rank() == 1:
        LocalTier._large_files = fail_to_read
    save_in_background(store, 1)
    wait_for_copies(store)
    LocalTier._large_files = large_files
    dist.barrier()
    outcomes = save_in_background(store, 2)
    assert store.close() == []
    outcomes += store.collect_outcomes()
    paths = [outcome.path for outcome in outcomes if isinstance(outcome, CommittedSave)]
    assert rank_checkpoints.shared_folder(tmp_path) / "step-00000002" in paths, outcomes


def test_save_succeeds_when_old_checkpoints_cannot_be_listed(tmp_path, monkeypatch):
    """A note says that no old checkpoint was deleted."""
    store = CheckpointStore(tmp_path)
    store.save(1, {"x": torch.zeros(2)}, {})

    def unreadable(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_dir, "list_checkpoint_steps", unreadable)
        saved = store.save(2, {"x": torch.zeros(2)}, {})
    assert saved.step == 2
    assert "Input/output error" in saved.notes[0]
    assert steps(tmp_path) == [1, 2]
