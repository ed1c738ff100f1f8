"""Full, missing and read-only disks: the save fails with one message, and earlier checkpoints stay."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import SCRIPTS
from helpers.commands import environment
from helpers.saved_states import names
from helpers.waiting import wait_for

from hpctrain.checkpoint.format.manifest import read_verified
from hpctrain.checkpoint.store import CheckpointStore
from hpctrain.errors import CheckpointError

MEGABYTE = {"x": torch.zeros(1 << 18)}
SMALL = {"x": torch.ones(16)}


def mount(*arguments: str | Path) -> None:
    result = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"nothing can be mounted here: {result.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount("-t", "tmpfs", "-o", "size=2m", "none", disk)
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("background", [False, True])
def test_save_on_full_disk_fails_and_leaves_no_files(small_disk, background):
    store = CheckpointStore(small_disk / "checkpoints")
    store.save(1, SMALL, {})
    filler = small_disk / "filler"
    filler.write_bytes(bytes(1_200_000))
    if background:
        store.async_save(2, MEGABYTE, {})
        assert store.wait(120)
        error = str(store.collect_outcomes()[0])
    else:
        with pytest.raises(CheckpointError) as raised:
            store.save(2, MEGABYTE, {})
        error = str(raised.value)
    assert "checkpoint of step 2 was not written to" in error
    assert "No space left on device" in error
    # The partial files are gone; they would leave no space for the next save.
    assert names(small_disk / "checkpoints") == ["step-00000001"]
    read_verified(small_disk / "checkpoints" / "step-00000001")
    filler.unlink()
    store.save(3, MEGABYTE, {})
    assert store.load_newest()[0].step == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "call", ["fsync", *(pytest.param(name, marks=pytest.mark.extended) for name in ("mkdir", "rename"))]
)
def test_disk_that_hangs_fails_saves_and_recovers(tmp_path, call):
    """Each such call takes four seconds; a save is reported as failed before it returns."""

    def outcomes(begin: int) -> list[str]:
        lines = (tmp_path / "said").read_text().splitlines()[begin:]
        return [line.partition(" ")[2] for line in lines]

    if shutil.which("strace") is None:
        pytest.skip("strace is not here")
    command = [sys.executable, str(SCRIPTS / "save_for_long.py"), str(tmp_path)]
    with subprocess.Popen(command, env=environment()) as saving:
        try:
            wait_for(lambda: (tmp_path / "said").exists() and outcomes(2), 60, "three checkpoints")
            command = ["strace", "-f", "-p", str(saving.pid), "-o", str(tmp_path / "calls")]
            command += ["-e", f"trace={call}", "-e", f"inject={call}:delay_enter=4000000"]
            with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
                try:
                    if "attached" not in (line := strace.stderr.readline()):
                        pytest.skip(f"strace may not attach here: {line.strip()}")
                    before = len(outcomes(0)) + 1
                    wait_for(lambda: len(outcomes(before)) >= 2, 30, "two saves on a disk that hangs")
                finally:
                    strace.kill()
            for outcome in outcomes(before)[:2]:
                assert re.search("not made progress for 0.3 s|still waiting for the disk", outcome)
            wait_for(lambda: outcomes(-1) == ["saved"], 30, "a checkpoint once the disk goes on")
        finally:
            (tmp_path / "stop").touch()
    loaded, broken = CheckpointStore(tmp_path / "checkpoints").load_newest()
    assert broken == []
    assert loaded.state["x"].tolist() == [float(loaded.step)] * 300
    assert [path.name for path in (tmp_path / "checkpoints").glob(".*")] == []


def test_read_only_folder_fails_saves_and_the_load_of_a_corrupt_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    store = CheckpointStore(folder)
    store.save(1, SMALL, {})
    (store.save(2, SMALL, {}).path / "state.json").write_text("{}")
    mount("--bind", folder, folder)
    try:
        mount("-o", "remount,ro,bind", folder)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            store.save(3, SMALL, {})
        with pytest.raises(
            CheckpointError, match=r"state\.json is 2 bytes long.*cannot be renamed.*Read-only"
        ):
            store.load_newest()
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
