import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from hpctrain.errors import StagingError
from hpctrain.runtime.staging import stage_node
from hpctrain.runtime.staging.stage_node import _choose_pack, pack_environment, relocate


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """Return a small folder that this process takes for its environment, without a base."""
    folder = tmp_path / "venv"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/tool").write_text(f"#!{folder}/bin/python\n")
    (folder / "pyvenv.cfg").write_text(f"home = {folder}/bin\n")
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(sys, "base_prefix", "/usr/local")
    return folder


def test_pack_does_not_change_when_another_job_uses_it(environment, tmp_path):
    packs, disk = tmp_path / "packs", tmp_path / "disk"
    pack = pack_environment(packs, disk)
    os.utime(pack, (1, 2.5))
    assert pack_environment(packs, disk) == pack
    assert (pack.stat().st_mtime, pack.stat().st_atime > 1) == (2.5, True)
    (environment / "new.py").write_text("new")
    os.utime(pack, (1, 2.5))
    assert [pack_environment(packs, disk).name] == os.listdir(packs)


def test_pack_of_another_job_is_not_replaced(environment, tmp_path, monkeypatch):
    packs, disk = tmp_path / "packs", tmp_path / "disk"
    others = []

    def run(*args):
        monkeypatch.setattr(stage_node, "run_program", real)
        (tmp_path / "other").mkdir()
        others.append(pack_environment(packs, tmp_path / "other").stat().st_ino)
        real(*args)

    real = stage_node.run_program
    monkeypatch.setattr(stage_node, "run_program", run)
    assert [pack_environment(packs, disk).stat().st_ino] == others
    assert len(os.listdir(packs)) == 1


def test_environment_that_changes_is_not_packed(environment, tmp_path, monkeypatch):
    def copy(*args):
        (environment / "bin/tool").write_text("changed")
        real(*args)

    real = stage_node.copy_contents
    monkeypatch.setattr(stage_node, "copy_contents", copy)
    with pytest.raises(StagingError, match="changed while it was copied"):
        pack_environment(tmp_path / "packs", tmp_path / "disk")
    assert os.listdir(tmp_path / "packs") == os.listdir(tmp_path / "disk") == []


def test_base_python_is_packed_without_unused_folders(tmp_path, monkeypatch):
    base = tmp_path / "conda"
    venv, stdlib = base / "envs/venv", base / "lib/python3"
    for name in ("bin", "pkgs", "envs/venv/bin", "lib/python3/site-packages", "lib/python3/__pycache__"):
        (base / name).mkdir(parents=True)
        (base / name / "file").touch()
    (base / "bin/python3").write_text("program")
    (venv / "bin/python").symlink_to(base / "bin/python3")
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(sys, "prefix", str(venv))
    monkeypatch.setattr(sys, "base_prefix", str(base))
    monkeypatch.setattr(sys, "path", [str(stdlib), str(venv / "lib/python3/site-packages")])
    pack = pack_environment(tmp_path / "packs", tmp_path / "disk")
    subprocess.run(["tar", "-xf", pack, "-C", tmp_path / "disk"], check=True)
    found = {str(path.relative_to(tmp_path / "disk/base")) for path in (tmp_path / "disk/base").rglob("file")}
    assert found == {"bin/file", "lib/python3/__pycache__/file"}
    assert (tmp_path / "disk/venv/bin/python").readlink() == Path("../../base/bin/python3")


def test_packs_of_another_user_are_refused(environment, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("giving a folder away takes root")
    (tmp_path / "packs").mkdir()
    os.chown(tmp_path / "packs", 65534, -1)
    with pytest.raises(PermissionError, match="packs belongs to user 65534, not to user 0"):
        pack_environment(tmp_path / "packs", tmp_path / "disk")


def test_removed_pack_is_packed_again(environment, tmp_path):
    chosen = tmp_path / "staging/environment-1"
    chosen.parent.mkdir()
    chosen.write_text(str(tmp_path / "removed.tar"))
    assert _choose_pack(chosen, tmp_path / "packs", tmp_path / "disk", is_first=True).exists()


@pytest.mark.parametrize(
    "first", ["#!{}/bin/python\n", '#!/bin/sh\n\'\'\'exec\' "{}/bin/python" "$0" "$@"\n']
)
def test_script_starts_the_python_of_the_copy(environment, tmp_path, first):
    # pip writes the second form if the path is long or contains a space.
    script = first + "' '''\nrun('{}')\n"
    (environment / "bin/tool").write_text(script.format(environment, "/old"))
    shutil.copytree(environment, tmp_path / "disk/venv")
    relocate(Path("/new"), tmp_path / "disk")
    assert (tmp_path / "disk/venv/bin/tool").read_text() == script.format("/new/venv", "/old")


def test_read_only_environment_is_relocated(environment):
    copy = Path(tempfile.mkdtemp())
    try:
        shutil.copytree(environment, copy / "venv")
        for path in (copy / "venv/pyvenv.cfg", copy / "venv/bin/tool"):
            path.chmod(0o444)
        if is_root := os.geteuid() == 0:
            for path in (copy, *copy.rglob("*")):
                os.chown(path, 65534, -1)
            os.seteuid(65534)
        try:
            relocate(Path("/new"), copy)
        finally:
            if is_root:
                os.seteuid(0)
        assert (copy / "venv/bin/tool").read_text() == "#!/new/venv/bin/python\n"
        assert (copy / "venv/pyvenv.cfg").read_text() == "home = /new/venv/bin\n"
    finally:
        shutil.rmtree(copy)
