"""Retention rules: checkpoints that are kept and deleted."""

import shutil

import pytest
import torch
from helpers.saved_states import names, steps

from hpctrain.checkpoint.format.manifest import FileEntry, read_verified
from hpctrain.checkpoint.io.retention import Retention
from hpctrain.checkpoint.listing import list_checkpoints
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import UserError
from hpctrain.rundir import RunDir

SCORES = {5: 0.9, 10: 0.1, 15: None, 20: 0.5, 25: 0.4, 30: float("nan")}


@pytest.mark.parametrize(
    ("retention", "kept"),
    [
        (Retention(last=2), [25, 30]),
        (Retention(last=1, every=10), [10, 20, 30]),
        (Retention(last=1, best=2), [10, 25, 30]),
        (Retention(last=1, best=1, mode="max"), [5, 30]),
        (Retention(last=2, every=15, best=1), [10, 15, 25, 30]),
    ],
)
def test_retention_keeps_expected_steps(tmp_path, retention, kept):
    store = CheckpointStore(tmp_path, retention=retention)
    for step, score in SCORES.items():
        store.save(step, {"x": torch.tensor(step)}, {}, score=score)
    assert steps(tmp_path) == kept
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]


def test_newest_verified_checkpoint_is_kept(tmp_path):
    store = CheckpointStore(tmp_path, retention=Retention(last=2))
    for step, verified_step in ((2, None), (4, 3), (6, 5), (8, 5), (10, 5), (12, 11)):
        store.save(step, {"x": torch.tensor(step)}, {}, verified_step=verified_step)
        manifest = read_verified(tmp_path / f"step-{step:08d}")
        assert manifest.verified_step == verified_step
        if step == 10:
            assert steps(tmp_path) == [4, 8, 10]
    assert steps(tmp_path) == [10, 12]


@pytest.mark.parametrize("rule", [{"last": 0}, {"every": 0}, {"best": -1}, {"last": True}, {"mode": "most"}])
def test_rule_out_of_range_is_refused(rule):
    with pytest.raises(UserError, match=next(iter(rule))):
        Retention(**rule)


def test_nothing_is_deleted_when_new_checkpoint_is_corrupt(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, retention=Retention(last=1))
    store.save(1, {"x": torch.zeros(2)}, {})
    commit = type(store._target.directory).commit

    def commit_and_lose_a_file(place, path, step, files):
        done = commit(place, path, step, files)
        (place.folder / f"step-{step:08d}" / "state.json").write_bytes(b"")
        return done

    monkeypatch.setattr(type(store._target.directory), "commit", commit_and_lose_a_file)
    saved = store.save(2, {"x": torch.zeros(2)}, {})
    assert "No old checkpoint was deleted" in saved.notes[0]
    assert read_verified(tmp_path / "step-00000001").step == 1
    assert CheckpointStore(tmp_path).load_newest()[0].step == 1


def test_failed_deletion_is_noted_and_folder_is_hidden(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path, retention=Retention(last=1))
    store.save(1, {"x": torch.zeros(2)}, {})

    def refuse(path, ignore_errors=False):
        if not ignore_errors:
            raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr("hpctrain.checkpoint.io.checkpoint_dir.shutil.rmtree", refuse)
        saved = store.save(2, {"x": torch.zeros(2)}, {})
    assert "could not be deleted: Permission denied" in saved.notes[0]
    assert steps(tmp_path) == [2]
    store.save(3, {"x": torch.zeros(2)}, {})
    assert names(tmp_path) == ["step-00000003"]


def test_corrupt_checkpoints_are_neither_deleted_nor_counted(tmp_path):
    store = CheckpointStore(tmp_path, retention=Retention(last=2))
    for step in (1, 2):
        store.save(step, {"x": torch.zeros(2)}, {})
    (tmp_path / "step-00000002" / "manifest.json").write_text("{}")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001.broken-0")
    for step in (3, 4):
        store.save(step, {"x": torch.zeros(2)}, {})
    assert names(tmp_path) == ["step-00000001.broken-0", *(f"step-0000000{n}" for n in (2, 3, 4))]


def test_checkpoint_deleted_during_listing_is_not_reported_corrupt(tmp_path, monkeypatch):
    run = RunDir(tmp_path)
    store = CheckpointStore(run.checkpoints)
    for step in (1, 2, 3):
        store.save(step, {"x": torch.zeros(2)}, {})
    check = FileEntry.verify

    def delete_and_verify(entry, folder):
        shutil.rmtree(run.checkpoint(1), ignore_errors=True)
        check(entry, folder)

    monkeypatch.setattr(FileEntry, "verify", delete_and_verify)
    listed, _ = list_checkpoints(run, verify=True)
    assert [(one.step, one.problems) for one in listed] == [(2, ()), (3, ())]
