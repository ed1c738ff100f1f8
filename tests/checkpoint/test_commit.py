"""Committing and loading: round trips, leftovers of unfinished saves, and the manifest."""

import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.saved_states import STATE, equal, names, save
from packaging.version import Version
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hpctrain.checkpoint.format.manifest import read_verified
from hpctrain.checkpoint.format.state_tree import join_tree, split_tree
from hpctrain.checkpoint.io.checkpoint_dir import (
    ABANDONED_AFTER_S,
    CheckpointDir,
    boot_identity,
    temporary_name,
)
from hpctrain.checkpoint.store import CheckpointStore


def test_loaded_state_equals_saved_state(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    saved = save(store, 100)
    assert saved.path == tmp_path / "checkpoints" / "step-00000100"
    loaded, broken = store.load_newest()
    assert broken == []
    assert loaded.step == 100
    assert equal(loaded.state, STATE)
    assert torch.equal(loaded.rank_state["torch"], torch.get_rng_state())
    assert saved.total_bytes == sum(
        path.stat().st_size for path in saved.path.iterdir() if path.name != "manifest.json"
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_dcp_reads_tensors_without_hpctrain(tmp_path):
    folder = save(CheckpointStore(tmp_path), 1).path
    target = {"state/module/weight": torch.empty(2, 3), "state/half": torch.empty(5, dtype=torch.bfloat16)}
    dcp.load(target, checkpoint_id=folder)
    assert torch.equal(target["state/module/weight"], STATE["module"]["weight"])
    assert torch.equal(target["state/half"], STATE["half"])
    if Version(torch.__version__) >= Version("2.8"):  # torch 2.6 converts only checkpoints of its own planner
        dcp_to_torch_save(folder, tmp_path / "one.pt")
        whole = torch.load(tmp_path / "one.pt", weights_only=True)
        assert torch.equal(whole["state/transposed"], STATE["transposed"])


def test_loading_unpickles_nothing(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    monkeypatch.setattr("pickle.load", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    assert equal(store.load_newest()[0].state, STATE)


def test_next_save_removes_leftovers_of_killed_save(tmp_path):
    leftover = tmp_path / temporary_name(10, boot_identity(), "0123abcd")
    leftover.mkdir()
    (leftover / "__0_0.distcp").write_bytes(b"half of it")
    deleting = tmp_path / ".deleting-step-00000001-0123abcd"
    deleting.mkdir()
    store = CheckpointStore(tmp_path)
    assert store.load_newest() == (None, [])
    save(store, 5)
    assert names(tmp_path) == ["step-00000005"]


def test_folder_locked_by_another_attempt_is_not_removed(tmp_path):
    with CheckpointDir(tmp_path).temporary_folder(temporary_name(10, boot_identity(), "0123abcd")) as other:
        save(CheckpointStore(tmp_path), 5)
        assert names(tmp_path) == [other.name, "step-00000005"]


def test_folder_of_another_machine_is_removed_only_when_old(tmp_path):
    other = tmp_path / temporary_name(10, "another0", "0123abcd")
    other.mkdir()
    (other / "__0_0.distcp").write_bytes(b"half of it")
    save(CheckpointStore(tmp_path), 5)
    assert names(tmp_path) == [other.name, "step-00000005"]
    long_ago = other.stat().st_mtime - ABANDONED_AFTER_S - 1
    os.utime(other, (long_ago, long_ago))
    save(CheckpointStore(tmp_path), 6)
    assert names(tmp_path) == [other.name, "step-00000005", "step-00000006"]  # its file is new
    os.utime(other / "__0_0.distcp", (long_ago, long_ago))
    save(CheckpointStore(tmp_path), 7)
    assert names(tmp_path) == ["step-00000005", "step-00000006", "step-00000007"]


def test_existing_step_is_not_overwritten(tmp_path):
    folder = CheckpointStore(tmp_path).save(5, {"x": torch.ones(2)}, {}).path
    before = (folder / "manifest.json").read_bytes()
    CheckpointStore(tmp_path).save(5, {"x": torch.ones(2)}, {})
    assert (folder / "manifest.json").read_bytes() == before
    assert names(tmp_path) == ["step-00000005"]


def test_manifest_is_plain_json_and_lists_all_files(tmp_path):
    folder = save(CheckpointStore(tmp_path), 7, score=0.5).path
    record = json.loads((folder / "manifest.json").read_text())
    assert (record["step"], record["world_size"], record["score"]) == (7, 1, 0.5)
    assert {entry["name"] for entry in record["files"]} == {
        path.name for path in folder.iterdir() if path.name != "manifest.json"
    }
    assert read_verified(folder).step == 7


@pytest.mark.parametrize(
    "value", [0.1 + 0.2, 1e-320, 2**70, float("inf"), "ü\n", [(1,), {"$tensor": 1}], {1: {2: 3}}]
)
def test_plain_values_round_trip_exactly(value):
    plain, tensors = split_tree(value, "x")
    assert equal(join_tree(json.loads(json.dumps(plain)), tensors), value)
