"""Copies on the local disk: complete, or absent."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from helpers.disks import mounted_disk

from hpctrain.errors import StagingError
from hpctrain.runtime import stage_node as module
from hpctrain.runtime.stage_node import list_contents, pack_environment, relocate, stage

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
    result = stage(source, disk / "data")
    assert contents(disk / "data") == contents(source)
    assert result["bytes"] == list_contents(disk / "data").size_bytes
    assert os.access(disk / "data/inner/run", os.X_OK)
    assert (disk / "data/a.bin").stat().st_mtime_ns == (source / "a.bin").stat().st_mtime_ns
    assert os.readlink(disk / "data/link") == "inner/run"
    assert not (disk / "data/outside").is_symlink()
    assert sorted(os.listdir(disk)) == [".data.json", "data"]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "zip"])
def test_archive_is_unpacked(source, disk, tmp_path, suffix):
    archive = tmp_path / f"data.{suffix}"
    if suffix == "zip":
        with zipfile.ZipFile(archive, "w") as file:
            file.write(source / "inner/run", "inner/run")
    else:
        subprocess.run(["tar", "-caf", archive, "-C", source, "inner"], check=True)
    stage(archive, disk / "data")
    assert (disk / "data/inner/run").read_text() == "#!/bin/sh\n"


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


@pytest.mark.parametrize("changed", ["source/inner/run", "disk/data/inner/run", "outside"])
def test_changed_file_is_copied_again(source, disk, tmp_path, changed):
    (source / "inner/empty").chmod(0o500)
    stage(source, disk / "data")
    (tmp_path / changed).write_text("changed")
    assert not stage(source, disk / "data")["reused"]
    assert contents(disk / "data") == contents(source)


@pytest.mark.parametrize("change", ["write", "remove"])
def test_source_that_changes_during_the_copy_leaves_nothing(source, disk, monkeypatch, change):
    def copy(*args):
        real(*args)
        (source / "a.bin").write_text("other") if change == "write" else (source / "inner/run").unlink()

    real = module._copy
    monkeypatch.setattr(module, "_copy", copy)
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


@pytest.mark.parametrize(
    ("suffix", "size", "message"),
    [
        ("tar.gz", -100, "cannot unpack '.*tar.gz'"),
        ("zip", -1, "cannot unpack"),
        ("tar", 1024, "is incomplete"),
    ],
)
def test_damaged_archive_is_refused(disk, tmp_path, suffix, size, message):
    """A tar archive may end after one of its files."""
    archive = tmp_path / f"data.{suffix}"
    for name in "ab":
        (tmp_path / name).write_bytes(os.urandom(512))
    if suffix == "zip":
        archive.write_bytes(b"no archive")
    else:
        subprocess.run(["tar", "-caf", archive, "-C", tmp_path, "a", "b"], check=True)
    archive.write_bytes(archive.read_bytes()[:size])
    with pytest.raises(StagingError, match=message):
        stage(archive, disk / "data")
    assert os.listdir(disk) == []


def test_archive_cannot_write_outside_its_folder(disk, tmp_path):
    (tmp_path / "file").write_text("bad")
    with tarfile.open(tmp_path / "data.tar", "w") as file:
        file.add(tmp_path / "file", "../../escaped")
    with pytest.raises(StagingError, match="contains '\\.\\.'"):
        stage(tmp_path / "data.tar", disk / "data")
    assert not (tmp_path / "escaped").exists()


def test_full_disk_is_reported_and_left_empty(source, tmp_path):
    subprocess.run(["tar", "-czf", tmp_path / "data.tar.gz", "-C", source, "."], check=True)
    with mounted_disk(tmp_path / "small", "size=2m") as small:
        with pytest.raises(StagingError, match=r"requires 9\.44 MB, but '.*small' has only 2\.1 MB of"):
            stage(source, small / "data")
        with pytest.raises(StagingError, match=r"has only .* of free space|No space left on device"):
            stage(tmp_path / "data.tar.gz", small / "data")
        assert os.listdir(small) == []


@pytest.fixture
def environment(tmp_path, disk, monkeypatch):
    """Return a small folder that this process takes for its virtual environment."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/tool").write_text(f"#!{folder}/bin/python\n")
    (folder / "bin/python").symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text(f"home = {folder}/bin\n")
    monkeypatch.setattr(sys, "prefix", str(folder))
    return folder


def test_pack_does_not_change_when_another_job_uses_it(environment, tmp_path, disk):
    packs = tmp_path / "packs"
    pack = pack_environment(packs, disk)
    os.utime(pack, (1, 2.5))
    assert pack_environment(packs, disk) == pack
    assert (pack.stat().st_mtime, pack.stat().st_atime > 1) == (2.5, True)
    (environment / "new.py").write_text("new")
    os.utime(pack, (1, 2.5))
    assert [pack_environment(packs, disk).name] == os.listdir(packs)


def test_pack_of_another_job_is_not_replaced(environment, tmp_path, disk, monkeypatch):
    other_packs = []

    def run(*args):
        monkeypatch.setattr(module, "run_program", real)
        (tmp_path / "other").mkdir()
        other_packs.append(pack_environment(tmp_path / "packs", tmp_path / "other").stat().st_ino)
        real(*args)

    real = module.run_program
    monkeypatch.setattr(module, "run_program", run)
    assert [pack_environment(tmp_path / "packs", disk).stat().st_ino] == other_packs
    assert len(os.listdir(tmp_path / "packs")) == 1


def test_packs_of_another_user_are_refused(environment, tmp_path, disk):
    if os.geteuid() != 0:
        pytest.skip("giving a folder away takes root")
    (tmp_path / "packs").mkdir()
    os.chown(tmp_path / "packs", 65534, -1)
    with pytest.raises(PermissionError, match="packs belongs to user 65534, not to user 0"):
        pack_environment(tmp_path / "packs", disk)


@pytest.mark.parametrize(
    "first_lines", ["#!{}/bin/python\n", '#!/bin/sh\n\'\'\'exec\' "{}/bin/python" "$0" "$@"\n']
)
def test_unpacked_environment_has_its_own_paths(environment, tmp_path, disk, first_lines):
    # pip writes the second form if the path is long or contains a space.
    script = first_lines + "' '''\nrun('{}')\n"
    (environment / "bin/tool").write_text(script.format(environment, "/old"))
    for path in (environment / "pyvenv.cfg", environment / "bin/tool"):
        path.chmod(0o444)
    copy = disk / ".environment"
    stage(pack_environment(tmp_path / "packs", disk), copy, finish=lambda part: relocate(Path("/new"), part))
    assert (copy / "venv/bin/tool").read_text() == script.format("/new/venv", "/old")
    assert (copy / "venv/pyvenv.cfg").read_text() == "home = /new/venv/bin\n"
    assert (copy / "venv/bin/python").readlink() == Path(sys.executable).resolve()
