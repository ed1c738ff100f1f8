from __future__ import annotations

import json
import math
import shutil
from collections import Counter

import pytest
import torch

from hpctrain.checkpoint.interval import SHORTEST_S, checkpoint_interval_s
from hpctrain.checkpoint.manifest import Manifest, committed_steps, verified
from hpctrain.checkpoint.retention import Retention
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.checkpoint.tree import join_tree, split_tree
from hpctrain.errors import CheckpointError

STATE = {
    "module": {"weight": torch.arange(6.0).reshape(2, 3), "count": torch.tensor(3)},
    "optimizer": {"state": {0: {"step": torch.tensor(2.0), "betas": (0.9, 0.999)}}, "lr": 0.1 + 0.2},
    "milestones": Counter({3: 1}),
    "none": None,
    "list": [1, "two", True],
}


def save(store, step):
    return store.save(step, STATE, {"torch": torch.get_rng_state()})


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


def test_what_is_loaded_is_what_was_saved(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    saved = save(store, 100)
    assert saved.path == tmp_path / "checkpoints" / "step-00000100"
    loaded, broken = store.load_newest()
    assert broken == []
    assert loaded.step == 100
    assert equal(loaded.state, STATE)
    assert torch.equal(loaded.rank_state["torch"], torch.get_rng_state())
    assert saved.total_bytes == sum(
        p.stat().st_size for p in saved.path.iterdir() if p.name != "manifest.json"
    )


def test_no_checkpoint(tmp_path):
    assert CheckpointStore(tmp_path / "none").load_newest() == (None, [])


def test_only_the_newest_are_kept(tmp_path):
    store = CheckpointStore(tmp_path, retention=Retention(last=2))
    for step in (5, 10, 15, 20):
        save(store, step)
    assert list(committed_steps(tmp_path)) == [20, 15]


@pytest.mark.parametrize("harm", ["flip", "cut", "lose a file", "lose the manifest", "garble the manifest"])
def test_broken_newest_is_named_and_set_aside_and_the_one_before_is_used(tmp_path, harm):
    store = CheckpointStore(tmp_path)
    save(store, 5)
    folder = save(store, 10).path
    victim = folder / "__0_0.distcp"
    match harm:
        case "flip":
            content = bytearray(victim.read_bytes())
            content[7] ^= 1
            victim.write_bytes(content)
        case "cut":
            victim.write_bytes(victim.read_bytes()[:-1])
        case "lose a file":
            victim.unlink()
        case "lose the manifest":
            (folder / "manifest.json").unlink()
        case "garble the manifest":
            (folder / "manifest.json").write_text('{"format": 1, "step"')
    loaded, broken = store.load_newest()
    assert loaded.step == 5
    assert len(broken) == 1
    assert str(folder) in broken[0]
    assert "step-00000010.broken-0" in broken[0]
    assert (tmp_path / "step-00000010.broken-0").is_dir()
    save(store, 10)
    assert store.load_newest()[0].step == 10


@pytest.mark.parametrize("trouble", ["another format", "a folder in place of the file"])
def test_what_cannot_be_judged_is_an_error_and_stays_where_it_is(tmp_path, trouble):
    store = CheckpointStore(tmp_path)
    save(store, 5)
    folder = save(store, 10).path
    if trouble == "another format":
        record = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**record, "format": 2}))
    else:  # any error of reading; permissions do not stop root
        (folder / "state.json").unlink()
        (folder / "state.json").mkdir()
    with pytest.raises(CheckpointError, match=r"format 2|Nothing was changed"):
        store.load_newest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005", "step-00000010"]


def test_every_flipped_byte_of_a_file_is_noticed(tmp_path):
    folder = CheckpointStore(tmp_path).save(1, {"x": torch.zeros(3)}, {}).path
    for name in ("state.json", ".metadata"):
        path = folder / name
        whole = path.read_bytes()
        for i in range(len(whole)):
            path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
            with pytest.raises(CheckpointError, match=name):
                verified(folder)
        path.write_bytes(whole)
    verified(folder)


def test_an_interrupted_save_is_no_checkpoint_and_does_not_hinder_the_next(tmp_path):
    store = CheckpointStore(tmp_path)
    save(store, 5)
    shutil.copytree(tmp_path / "step-00000005", tmp_path / ".saving-step-00000010")
    assert store.load_newest()[0].step == 5
    save(store, 10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000005", "step-00000010"]


def test_a_folder_that_cannot_be_made_is_an_error_and_harms_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be begun"):
        save(CheckpointStore(tmp_path / "file" / "checkpoints"), 1)


def test_a_value_that_json_cannot_hold_is_refused_with_its_path(tmp_path):
    with pytest.raises(CheckpointError, match=r"state/scheduler/fn is a builtins\.object"):
        CheckpointStore(tmp_path).save(1, {"scheduler": {"fn": object()}}, {})
    assert list(committed_steps(tmp_path)) == []


def test_manifest_of_another_format_is_refused(tmp_path):
    folder = save(CheckpointStore(tmp_path), 1).path
    record = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**record, "format": 2}))
    with pytest.raises(CheckpointError, match="format 2"):
        Manifest.read(folder)


@pytest.mark.parametrize(
    "value", [0.1 + 0.2, 1e-320, 2**70, float("inf"), "ü\n", [(1,), {"$tensor": 1}], {1: {2: 3}}]
)
def test_plain_values_survive_exactly(value):
    plain, tensors = split_tree(value, "x")
    assert equal(join_tree(json.loads(json.dumps(plain)), tensors), value)


def test_interval_is_youngs():
    assert checkpoint_interval_s(2.0, 1) == pytest.approx(math.sqrt(2 * 2.0 * 86_400))
    assert checkpoint_interval_s(2.0, 4) == pytest.approx(checkpoint_interval_s(2.0, 1) / 2)
    assert checkpoint_interval_s(1e-6, 1) == SHORTEST_S
