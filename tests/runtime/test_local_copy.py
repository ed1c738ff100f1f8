import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers.disks import mounted_disk
from helpers.waiting import wait_for

from hpctrain.errors import StagingError
from hpctrain.runtime.staging import local_copy
from hpctrain.runtime.staging.local_copy import stage

#: They start many processes, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    (folder / "inner/empty").mkdir(parents=True)
    (folder / "a.bin").write_bytes(os.urandom(9 * 1024**2))
    (folder / "inner/run").write_text("#!/bin/sh\n")
    (folder / "inner/run").chmod(0o755)
    (folder / "link").symlink_to("inner/run")
    (tmp_path / "outside").write_text("outside")
    (folder / "outside").symlink_to(tmp_path / "outside")
    return folder


@pytest.fixture
def disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def test_folder_is_copied_with_modes_times_and_links(source, disk):
    found = stage(source, disk / "data")
    assert contents(disk / "data") == contents(source)
    assert found["bytes"] == local_copy.list_contents(disk / "data").size_bytes
    assert os.access(disk / "data/inner/run", os.X_OK)
    assert (disk / "data/a.bin").stat().st_mtime_ns == (source / "a.bin").stat().st_mtime_ns
    assert os.readlink(disk / "data/link") == "inner/run"
    assert not (disk / "data/outside").is_symlink()
    assert sorted(os.listdir(disk)) == [".data.json", "data"]


def test_file_behind_a_link_is_copied(source, disk):
    stage(source / "link", disk / "program")
    assert (disk / "program").read_text() == "#!/bin/sh\n"


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tgz", "tar.bz2", "tar.xz", "tar.zst"])
def test_archive_is_unpacked(source, disk, tmp_path, suffix):
    if suffix == "tar.zst" and shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    subprocess.run(["tar", "-caf", tmp_path / f"data.{suffix}", "-C", source, "inner"], check=True)
    stage(tmp_path / f"data.{suffix}", disk / "data")
    assert contents(disk / "data/inner") == contents(source / "inner")


def test_zip_archive_is_unpacked(source, disk, tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as file:
        file.write(source / "a.bin", "top/a.bin")
    stage(tmp_path / "data.zip", disk / "data")
    assert (disk / "data/top/a.bin").read_bytes() == (source / "a.bin").read_bytes()


def test_unchanged_copy_is_reused(source, disk):
    first = stage(source, disk / "data")
    inode = (disk / "data").stat().st_ino
    (disk / "data/__pycache__").mkdir()
    record = json.loads((disk / ".data.json").read_text())
    (disk / ".data.json").write_text(json.dumps({**record, "seconds": 100.0}))
    again = stage(source, disk / "data")
    assert (disk / "data").stat().st_ino == inode
    assert (first["reused"], again["reused"]) == (False, True)
    assert again["source"] == first["source"]
    assert 50 < again["saved_s"] < 100


@pytest.mark.parametrize("side", ["source", "copy"])
def test_changed_file_is_copied_again(source, disk, side):
    stage(source, disk / "data")
    ((source if side == "source" else disk / "data") / "inner/run").write_text("changed")
    assert not stage(source, disk / "data")["reused"]
    assert contents(disk / "data") == contents(source)


def test_read_only_copy_is_replaced(source, disk):
    (source / "inner").chmod(0o500)
    stage(source, disk / "data")
    (source / "a.bin").write_text("new")
    assert not stage(source, disk / "data")["reused"]
    assert (disk / "data/a.bin").read_text() == "new"


@pytest.mark.parametrize("change", ["write", "remove"])
def test_source_that_changes_during_the_copy_leaves_nothing(source, disk, monkeypatch, change):
    def copy(*args):
        real(*args)
        (source / "a.bin").write_text("other") if change == "write" else (source / "inner/run").unlink()

    real = local_copy._copy
    monkeypatch.setattr(local_copy, "_copy", copy)
    with pytest.raises((StagingError, FileNotFoundError)):
        stage(source, disk / "data")
    assert os.listdir(disk) == []


def test_interrupted_copy_is_never_used(source, disk):
    (disk / ".data.part").mkdir()
    (disk / ".data.part/a.bin").write_text("half")
    stage(source, disk / "data")
    assert contents(disk / "data") == contents(source)
    (disk / ".data.json").unlink()
    (disk / "data/a.bin").unlink()
    assert not stage(source, disk / "data")["reused"]
    assert contents(disk / "data") == contents(source)


def test_damaged_archive_is_refused(source, disk, tmp_path):
    archive = tmp_path / "data.tar.gz"
    subprocess.run(["tar", "-czf", archive, "-C", source, "."], check=True)
    archive.write_bytes(archive.read_bytes()[:-1000])
    (tmp_path / "data.zip").write_bytes(b"no archive")
    for path in (archive, tmp_path / "data.zip"):
        with pytest.raises(StagingError, match=f"cannot unpack '{path}'"):
            stage(path, disk / "data")
    assert os.listdir(disk) == []


@pytest.mark.parametrize("cut_bytes", [512, 900])
def test_archive_that_ends_after_a_file_is_refused(disk, tmp_path, cut_bytes):
    with tarfile.open(tmp_path / "data.tar", "w") as file:
        for name in "ab":
            (tmp_path / name).write_text("content")
            file.add(tmp_path / name, name)
    archive = tmp_path / "data.tar"
    archive.write_bytes(archive.read_bytes()[: 512 + cut_bytes])
    with pytest.raises(StagingError, match=f"'{archive}' is incomplete"):
        stage(archive, disk / "data")
    assert os.listdir(disk) == []


def test_archive_cannot_write_outside_its_folder(disk, tmp_path):
    (tmp_path / "file").write_text("bad")
    with tarfile.open(tmp_path / "data.tar", "w") as file:
        file.add(tmp_path / "file", "../../escaped")
    with pytest.raises(StagingError, match="contains '\\.\\.'"):
        stage(tmp_path / "data.tar", disk / "data")
    assert not (tmp_path / "escaped").exists()


def test_modules_may_be_compiled_during_the_copy(source, disk, monkeypatch):
    def list_files(*args, **options):
        found = list(walk(*args, **options))
        (source / "__pycache__/a.pyc.123").unlink(missing_ok=True)
        return found

    (source / "__pycache__").mkdir()
    for name in ("a.pyc", "a.pyc.123"):
        (source / "__pycache__" / name).write_text(name)
    walk = os.walk
    monkeypatch.setattr(os, "walk", list_files)
    stage(source, disk / "data")
    assert os.listdir(disk / "data/__pycache__") == ["a.pyc"]


def test_special_file_is_refused(source, disk):
    os.mkfifo(source / "pipe")
    with pytest.raises(StagingError, match="neither a regular file nor a folder"):
        stage(source, disk / "data")


def test_full_disk_is_reported_and_left_empty(source, tmp_path):
    subprocess.run(["tar", "-czf", tmp_path / "data.tar.gz", "-C", source, "."], check=True)
    with mounted_disk(tmp_path / "small", "size=2m") as small:
        with pytest.raises(StagingError, match=r"requires 9\.44 MB, but '.*small' has only 2\.1 MB of"):
            stage(source, small / "data")
        with pytest.raises(StagingError, match=r"has only .* of free space|No space left on device"):
            stage(tmp_path / "data.tar.gz", small / "data")
        assert os.listdir(small) == []


def test_damaged_file_in_a_zip_archive_is_refused(disk, tmp_path):
    with zipfile.ZipFile(tmp_path / "data.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a", "content" * 1000)
    content = bytearray((tmp_path / "data.zip").read_bytes())
    content[31:40] = b"\xff" * 9
    (tmp_path / "data.zip").write_bytes(content)
    with pytest.raises(StagingError, match=r"cannot unpack .*while decompressing"):
        stage(tmp_path / "data.zip", disk / "data")


def test_changed_file_behind_a_link_is_copied_again(source, disk, tmp_path):
    size = stage(source, disk / "data")["bytes"]
    (tmp_path / "outside").write_text("changed outside")
    found = stage(source, disk / "data")
    assert (found["reused"], found["bytes"] - size) == (False, len("changed outside") - len("outside"))
    assert (disk / "data/outside").read_text() == "changed outside"


def test_killed_process_ends_the_program_that_unpacks(tmp_path):
    code = (
        "from hpctrain.runtime.staging.local_copy import run_program\n"
        "run_program(['sh', '-c', 'echo $$; exec sleep 60'], 'sleep')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    process.kill()
    process.communicate()
    wait_for(
        lambda: not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text(), 10, pid
    )
