"""Disks that are full, gone or read-only: a save fails in one sentence, and what is there stays."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers.saved_states import names, steps

from hpctrain.checkpoint.format.manifest import read_verified
from hpctrain.checkpoint.io import file_writer
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import CheckpointError

MEGABYTE = {"x": torch.zeros(1 << 18)}
SMALL = {"x": torch.ones(16)}


def mounted(*words: str | Path) -> None:
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted("-t", "tmpfs", "-o", "size=2m", "none", disk)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_a_full_disk(small_disk, background):
    store = CheckpointStore(small_disk / "checkpoints")
    store.save(1, SMALL, {})
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1_200_000))
    if background:
        store.async_save(2, MEGABYTE, {})
        assert store.wait(10)
        error = str(store.collect_outcomes()[0])
    else:
        with pytest.raises(CheckpointError) as raised:
            store.save(2, MEGABYTE, {})
        error = str(raised.value)
    assert "checkpoint of step 2 was not written to" in error
    assert "No space left on device" in error
    # What was written of it is gone: it would be in the way of the next one.
    assert names(small_disk / "checkpoints") == ["step-00000001"]
    read_verified(small_disk / "checkpoints" / "step-00000001")
    filler.unlink()
    store.save(3, MEGABYTE, {})
    assert store.load_newest()[0].step == 3


def test_a_disk_that_is_full_at_the_last_moment(small_disk):
    """The tensors fit, the tables do not."""
    store = CheckpointStore(small_disk / "checkpoints")
    store.save(1, SMALL, {})
    free = shutil.disk_usage(small_disk).free
    (small_disk / "filler").write_bytes(bytes(free - (1 << 20) - 8192))
    with pytest.raises(CheckpointError, match="No space left"):
        store.save(2, {**MEGABYTE, "text": "x" * 100_000}, {})
    assert names(small_disk / "checkpoints") == ["step-00000001"]
    assert store.load_newest()[0].step == 1


def test_a_quota_that_is_used_up_by_a_fake(tmp_path, monkeypatch):
    store = CheckpointStore(tmp_path)
    store.save(1, SMALL, {})

    def refuse(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with monkeypatch.context() as patched:
        patched.setattr(file_writer.os, "fsync", refuse)  # where network file systems tell
        with pytest.raises(CheckpointError, match="Disk quota exceeded"):
            store.save(2, SMALL, {})
    assert names(tmp_path) == ["step-00000001"]
    assert store.save(3, SMALL, {}).step == 3


def test_a_folder_that_became_read_only(tmp_path):
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder)
    store.save(1, SMALL, {})
    mounted("--bind", folder, folder)
    try:
        mounted("-o", "remount,ro,bind", folder)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            store.save(2, SMALL, {})
        assert store.load_newest()[0].step == 1
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
    store.save(3, SMALL, {})
    assert steps(folder) == [1, 3]


def test_a_broken_checkpoint_in_a_read_only_folder_is_an_error_that_names_both(tmp_path):
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder)
    store.save(1, SMALL, {})
    (store.save(2, SMALL, {}).path / "state.json").write_text("{}")
    mounted("--bind", folder, folder)
    try:
        mounted("-o", "remount,ro,bind", folder)
        with pytest.raises(CheckpointError, match=r"state\.json has 2 bytes.*cannot be set aside.*Read-only"):
            store.load_newest()
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_folder_that_vanished_between_two_saves(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(1, SMALL, {})
    (tmp_path / "checkpoints").rename(tmp_path / "away")
    store.save(2, SMALL, {})
    assert steps(tmp_path / "checkpoints") == [2]
    assert steps(tmp_path / "away") == [1]


def test_a_folder_that_vanishes_during_a_save(tmp_path, monkeypatch):
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder)
    store.save(1, SMALL, {})
    write = file_writer.FileWriter._write

    def write_and_lose(writing, part):
        entry = write(writing, part)
        folder.rename(tmp_path / "away")
        return entry

    with monkeypatch.context() as patched:
        patched.setattr(file_writer.FileWriter, "_write", write_and_lose)
        with pytest.raises(CheckpointError, match="No such file or directory"):
            store.save(2, SMALL, {})
    assert steps(tmp_path / "away") == [1]
    (tmp_path / "away").rename(folder)
    store.save(3, SMALL, {})
    assert names(folder) == ["step-00000001", "step-00000003"]


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"step 1 was not written.*Not a directory"):
        CheckpointStore(tmp_path / "file" / "checkpoints").save(1, SMALL, {})
