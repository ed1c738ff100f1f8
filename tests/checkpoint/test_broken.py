"""A byte that changed is noticed, wherever it lies; what is broken is said and set aside."""

from __future__ import annotations

import json

import pytest
import torch
import xxhash
from helpers.saved_states import names, save

from hpctrain.checkpoint.format.manifest import read_verified
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import CheckpointError, CorruptCheckpoint


@pytest.mark.parametrize("harm", ["flip", "cut", "lengthen", "lose a file", "lose the manifest", "empty"])
def test_broken_newest_is_named_and_set_aside_and_the_one_before_is_used(tmp_path, harm):
    store = CheckpointStore(tmp_path)
    save(store, 5)
    folder = save(store, 10).path
    victim = folder / "__0_0.distcp"
    content = victim.read_bytes()
    match harm:
        case "flip":
            victim.write_bytes(content[:7] + bytes([content[7] ^ 1]) + content[8:])
        case "cut":
            victim.write_bytes(content[:-1])
        case "lengthen":
            victim.write_bytes(content + b"\0")
        case "lose a file":
            victim.unlink()
        case "lose the manifest":
            (folder / "manifest.json").unlink()
        case "empty":
            (folder / "manifest.json").write_bytes(b"")
    loaded, broken = store.load_newest()
    assert loaded.step == 5
    assert len(broken) == 1
    assert str(folder) in broken[0]
    assert "step-00000010.broken-0" in broken[0]
    assert (tmp_path / "step-00000010.broken-0").is_dir()
    save(store, 10)
    assert store.load_newest()[0].step == 10


@pytest.mark.slow
def test_every_flipped_byte_of_every_file_is_noticed(tmp_path):
    """Each byte in turn, one bit of it; the manifest included."""
    folder = CheckpointStore(tmp_path).save(1, {"x": torch.zeros(3), "lr": 0.1}, {}).path
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for i, byte in enumerate(whole):
            path.write_bytes(whole[:i] + bytes([byte ^ (1 << i % 8)]) + whole[i + 1 :])
            with pytest.raises(CorruptCheckpoint, match=path.name):
                read_verified(folder)
        path.write_bytes(whole)
    assert read_verified(folder).step == 1


@pytest.mark.long
def test_every_flipped_byte_of_every_file_is_never_loaded(tmp_path):
    """As above, but on disk and through the whole store."""
    store = CheckpointStore(tmp_path)
    store.save(1, {"x": torch.zeros(3)}, {})
    folder = store.save(2, {"x": torch.ones(3), "lr": 0.1}, {}).path
    for name in names(folder):
        whole = (folder / name).read_bytes()
        for i, byte in enumerate(whole):
            (folder / name).write_bytes(whole[:i] + bytes([byte ^ (1 << i % 8)]) + whole[i + 1 :])
            loaded, broken = store.load_newest()
            assert (loaded.step, len(broken)) == (1, 1), (name, i)
            (tmp_path / "step-00000002.broken-0").rename(folder)
        (folder / name).write_bytes(whole)
    assert store.load_newest()[0].step == 2


@pytest.mark.parametrize("trouble", ["another format", "a folder in place of the file"])
def test_what_cannot_be_judged_is_an_error_and_stays_where_it_is(tmp_path, trouble):
    store = CheckpointStore(tmp_path)
    save(store, 5)
    folder = save(store, 10).path
    if trouble == "another format":
        body, seal, _ = (folder / "manifest.json").read_bytes().rpartition(b',\n"xxh3_128": "')
        body = body.replace(b'"format": 1', b'"format": 99')
        digest = xxhash.xxh3_128_hexdigest(body).encode()
        (folder / "manifest.json").write_bytes(body + seal + digest + b'"\n}\n')
        assert json.loads((folder / "manifest.json").read_text())["format"] == 99
    else:  # any error of reading; permissions do not stop root
        (folder / "state.json").unlink()
        (folder / "state.json").mkdir()
    with pytest.raises(CheckpointError, match=r"format 99|Nothing was changed"):
        store.load_newest()
    assert names(tmp_path) == ["step-00000005", "step-00000010"]


def test_a_checkpoint_under_the_name_of_another_step_is_broken(tmp_path):
    folder = save(CheckpointStore(tmp_path), 5).path
    with pytest.raises(CorruptCheckpoint, match="manifest of step 5"):
        read_verified(folder.rename(folder.with_name("step-00000006")))
