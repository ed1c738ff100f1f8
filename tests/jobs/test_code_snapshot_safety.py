"""Working trees that try to make a code snapshot read outside files, run programs, or never end."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import pytest
from helpers.commands import environment, run_command

from hpctrain.errors import SpecError
from hpctrain.jobs.submit.code_snapshot import plan_snapshot
from hpctrain.rundir import RunDir

SECRET = "outside-secret-42"


def git(folder: Path, *args: str) -> str:
    identity = ["-c", "user.name=Me", "-c", "user.email=me@example.org", "-c", "protocol.file.allow=always"]
    return run_command(
        ["git", *identity, "-C", folder, *args], {"GIT_CONFIG_GLOBAL": "/dev/null"}
    ).stdout.strip()


def make_repository(folder: Path) -> Path:
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "train.py").write_text("print('here')\n")
    (folder / "data").mkdir()
    (folder / "data" / "x.txt").write_text("inside\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=first")
    return folder


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return make_repository(tmp_path_factory.mktemp("template") / "repo")


@pytest.fixture
def repo(tmp_path, template) -> Path:
    return shutil.copytree(template, tmp_path / "repo")


@pytest.fixture
def outside(tmp_path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "x.txt").write_text(SECRET)
    return folder


def copy_code(repo: Path, limit_mb: int = 20) -> Path:
    """Return the snapshot that a submission would make."""
    snapshot, notes = plan_snapshot(str(repo / "train.py"), limit_mb, environment())
    assert snapshot is not None, notes
    run = RunDir(repo.parent / "run")
    run.path.mkdir(exist_ok=True)
    copy = Path(snapshot.reference(run).copy)
    with snapshot.copied_to(copy):
        return copy


def assert_nothing_from_outside(copy: Path) -> None:
    for path in copy.rglob("*"):
        assert path.is_symlink() or path.is_dir() or SECRET not in path.read_text(errors="replace"), path


def test_symlinks_stay_symlinks(repo, outside):
    targets = {
        "loop": "loop",
        "there": "back",
        "back": "there",
        "up": "..",
        "root": "/",
        "endless": "/dev/zero",
        "terminal": "/dev/tty",
        "process": "/proc/self/environ",
        "far": "../" * 60 + "etc/passwd",
        "outside": str(outside),
        "data/further": "../outside/x.txt",
        "new\nline": "../outside/x.txt",
    }
    for name, target in targets.items():
        (repo / name).symlink_to(target)
    git(repo, "add", "--all")
    copy = copy_code(repo)
    assert all((copy / name).is_symlink() for name in targets)
    assert_nothing_from_outside(copy)
    assert (outside / "x.txt").read_text() == SECRET


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    cwd = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has a length limit
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(cwd)


@pytest.mark.parametrize("make", [make_fifo, make_socket])
@pytest.mark.parametrize("name", ["data/x.txt", "new.py"])
def test_special_file_is_refused_or_ignored(repo, make, name):
    (repo / name).unlink(missing_ok=True)
    make(repo / name)
    if name == "new.py":
        assert not (copy_code(repo) / name).exists()
    else:
        with pytest.raises(
            SpecError,
            match=r"data/x\.txt': it is neither a regular file nor a symbolic link.*--no-code-snapshot",
        ):
            copy_code(repo)


def test_repository_with_an_outside_worktree_copies_nothing_from_it(repo, outside):
    """A `.git` file names a repository with another working tree."""
    git(outside, "init", "--quiet")
    git(outside, "add", ".")
    git(outside, "config", "core.worktree", str(outside))
    victim = repo.parent / "victim"
    victim.mkdir()
    (victim / "train.py").write_text("print('victim')\n")
    (victim / ".git").write_text(f"gitdir: {outside / '.git'}\n")
    snapshot, notes = plan_snapshot(str(victim / "train.py"), 20, environment())
    assert snapshot is None
    assert str(outside) in notes[0]


@pytest.mark.parametrize("location", [".", "inner"])
def test_programs_of_the_repository_are_not_run(repo, location, tmp_path):
    """Hooks, file system monitors, external diffs and converters."""
    executed = tmp_path / "executed"
    inner = repo if location == "." else shutil.copytree(repo, tmp_path / location).rename(repo / location)
    program = inner / ".git" / "program"
    program.write_text(f"#!/bin/sh\ntouch {executed}\ncat\n")
    program.chmod(0o755)
    for name in ("core.fsmonitor", "diff.external", "diff.evil.command", "diff.evil.textconv", "core.pager"):
        git(inner, "config", name, str(program))
    for hook in ("post-index-change", "query-watchman", "pre-commit", "fsmonitor-watchman"):
        (inner / ".git" / "hooks").mkdir(exist_ok=True)
        (inner / ".git" / "hooks" / hook).symlink_to(program)
    (inner / ".gitattributes").write_text("*.txt diff=evil\n")
    (inner / "data" / "x.txt").write_text("changed\n")
    executed.unlink(missing_ok=True)
    copy_code(repo)
    assert not executed.exists()
