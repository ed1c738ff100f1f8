"""Corrupt checkpoints: any changed byte is detected, and the checkpoint is reported and set aside."""

import json

import pytest
import torch
import xxhash
from helpers.saved_states import names, save

from hpctrain.checkpoint.format.manifest import read_verified
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import CheckpointError, CorruptCheckpoint


@pytest.mark.parametrize("damage", ["flip", "cut", "lengthen", "lose a file", "lose the manifest", "empty"])
def test_corrupt_newest_checkpoint_is_set_aside_and_previous_is_loaded(tmp_path, damage):
    store = CheckpointStore(tmp_path)
    save(store, 5)
    folder = save(store, 10).path
    victim = folder / "__0_0.distcp"
    content = victim.read_bytes()
    match damage:
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
def test_every_flipped_byte_is_detected_when_read(tmp_path):
    """One bit of each byte in turn, including the manifest."""
    folder = CheckpointStore(tmp_path).save(1, {"x": torch.zeros(3), "lr": 0.1}, {}).path
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        for i, byte in enumerate(content):
            path.write_bytes(content[:i] + bytes([byte ^ (1 << i % 8)]) + content[i + 1 :])
            with pytest.raises(CorruptCheckpoint, match=path.name):
                read_verified(folder)
        path.write_bytes(content)
    assert read_verified(folder).step == 1


@pytest.mark.parametrize("problem", ["another format", "a folder in place of the file"])
def test_unreadable_checkpoint_is_an_error_and_is_not_moved(tmp_path, problem):
    store = CheckpointStore(tmp_path)
    save(store, 5)
    folder = save(store, 10).path
    if problem == "another format":
        body, seal, _ = (folder / "manifest.json").read_bytes().rpartition(b',\n"xxh3_128": "')
        body = body.replace(b'"format": 1', b'"format": 99')
        digest = xxhash.xxh3_128_hexdigest(body).encode()
        (folder / "manifest.json").write_bytes(body + seal + digest + b'"\n}\n')
        assert json.loads((folder / "manifest.json").read_text())["format"] == 99
    else:  # any read error; root ignores permissions
        (folder / "state.json").unlink()
        (folder / "state.json").mkdir()
    with pytest.raises(CheckpointError, match=r"format 99|No checkpoint was changed"):
        store.load_newest()
    assert names(tmp_path) == ["step-00000005", "step-00000010"]


def test_checkpoint_renamed_to_another_step_is_corrupt(tmp_path):
    folder = save(CheckpointStore(tmp_path), 5).path
    with pytest.raises(CorruptCheckpoint, match="its manifest is for step 5"):
        read_verified(folder.rename(folder.with_name("step-00000006")))
