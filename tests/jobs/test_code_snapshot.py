"""The code snapshot of a submission, which a run uses whatever happens to the original files.

The last tests have working trees that try to read outside files, run programs, or never end.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import environment, run_command
from helpers.waiting import wait_for

from hpctrain.errors import SchedulerError, SpecError
from hpctrain.jobs.submit.code_snapshot import plan_snapshot
from hpctrain.jobs.submit.submit_prepared import submit_prepared
from hpctrain.jobspec.load_spec import load_spec
from hpctrain.rundir import RunDir
from hpctrain.runtime.snapshot_imports import describe_missing_copy

#: They start many processes, so `make test-fast` leaves them out.
pytestmark = pytest.mark.slow


def git(folder: Path, *args: str) -> str:
    identity = ["-c", "user.name=Me", "-c", "user.email=me@example.org", "-c", "protocol.file.allow=always"]
    return run_command(
        ["git", *identity, "-C", folder, *args], {"GIT_CONFIG_GLOBAL": "/dev/null"}
    ).stdout.strip()


@pytest.fixture
def repo(tmp_path) -> Path:
    """A working tree with every kind of file that git distinguishes."""
    other = tmp_path / "other"
    for folder, file in ((other, "lib.py"), (repo := tmp_path / "repo", "train.py")):
        folder.mkdir()
        git(folder, "init", "--quiet", "--initial-branch=main")
        (folder / file).write_text("print('committed')\n")
    git(other, "add", ".")
    git(other, "commit", "--quiet", "--message=first")
    (repo / "package").mkdir()
    for name in ("changed.py", "removed.py", "package/__init__.py"):
        (repo / name).write_text("value = 1\n")
    (repo / "run.sh").touch(mode=0o755)
    (repo / ".gitignore").write_text("data/\n*.ckpt\n")
    git(repo, "add", ".")
    git(repo, "submodule", "--quiet", "add", str(other), "module")
    git(repo, "commit", "--quiet", "--message=first")
    (repo / "changed.py").write_text("value = 2\n")
    (repo / "removed.py").unlink()
    (repo / "new.py").write_text("value = 3\n")
    (repo / "module" / "new.py").touch()
    (repo / "data").mkdir()
    (repo / "data" / "x.txt").write_text("data")
    (repo / "big.ckpt").touch()
    return repo


def submit_and_get_copy(prepared, repo: Path, **options) -> Path:
    """Return the code snapshot of a submission."""
    submission = prepared(script=repo / "train.py", **options)
    run, _ = submit_prepared(submission)
    run.wait(timeout=120)
    spec = load_spec(run.dir.spec)
    assert spec == submission.spec, "the specification was changed after it was prepared"
    code = spec.code
    assert code is not None
    assert code.script == f"{code.copy}/train.py"
    return Path(code.copy)


def files_in(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()
    }


def test_tracked_and_new_files_are_copied(prepared, repo):
    copy = submit_and_get_copy(prepared, repo)
    expected = {
        "train.py",
        "changed.py",
        "new.py",
        "package/__init__.py",
        "run.sh",
        ".gitignore",
        ".gitmodules",
    }
    assert files_in(copy) == expected | {"module/lib.py", "module/new.py"}
    assert (copy / "changed.py").read_text() == "value = 2\n"
    assert os.access(copy / "run.sh", os.X_OK)
    assert not os.access(copy / "new.py", os.X_OK)


def test_commit_and_changes_are_recorded(prepared, repo):
    copy = submit_and_get_copy(prepared, repo)
    record = json.loads(copy.with_name(f"{copy.name}.json").read_text())
    assert record["commit"] == git(repo, "rev-parse", "HEAD")
    assert (record["source"], record["changed"], record["new_files"]) == (
        str(repo),
        True,
        ["new.py", "module/new.py"],
    )
    assert record["num_files"] == len(files_in(copy))
    patch = copy.with_name(f"{copy.name}.diff")
    # Git itself can apply the patch.
    git(repo, "stash", "--quiet")
    git(repo, "apply", "--include=changed.py", "--include=removed.py", str(patch))
    assert (repo / "changed.py").read_text() == "value = 2\n"
    assert not (repo / "removed.py").exists()


def test_links_lead_to_the_copy_or_to_their_original_target(prepared, repo, tmp_path):
    targets = {
        "copied": "changed.py",
        "copied folder": str(repo / "package"),
        "package/up": "../changed.py",
        "ignored": "data",
        "outside": "../other/lib.py",
        "absolute": "/etc/hostname",
        "dangling": "nowhere",
    }
    for name, target in targets.items():
        (repo / name).symlink_to(target)
    copy = submit_and_get_copy(prepared, repo)
    actual = {name: os.readlink(copy / name) for name in targets}
    assert actual == {
        **targets,
        "copied folder": "package",
        "ignored": str(repo / "data"),
        "outside": str(tmp_path / "other/lib.py"),
        "dangling": str(repo / "nowhere"),
    }
    assert (copy / "ignored" / "x.txt").read_text() == "data"


def test_resubmitted_run_gets_a_new_copy(prepared, repo):
    first = submit_and_get_copy(prepared, repo, run_dir="r")
    (repo / "changed.py").write_text("value = 4\n")
    second = submit_and_get_copy(prepared, repo, run_dir="r")
    assert [copy.name for copy in (first, second)] == ["submission-000", "submission-001"]
    assert [(copy / "changed.py").read_text() for copy in (first, second)] == ["value = 2\n", "value = 4\n"]


def test_submission_prepared_before_another_one_is_refused(prepared, repo):
    late = prepared(script=repo / "train.py", run_dir="r")
    copy = submit_and_get_copy(prepared, repo, run_dir="r")
    with pytest.raises(SpecError, match="was submitted again in the meantime"):
        submit_prepared(late)
    assert (copy / "train.py").exists()


def test_missing_repository_is_noted_if_the_job_waits(prepared, script):
    _, (note,) = plan_snapshot(str(script), 1, environment())
    assert "the code is not copied (not in a git repository)" in note
    submission = prepared(script=script)
    assert submission.snapshot is None
    assert submission.notes == ()
    run, _ = submit_prepared(submission)
    run.wait(timeout=120)
    spec = load_spec(run.dir.spec)
    assert (spec.code, spec.entry) == (None, str(script))
    assert not (run.dir.path / "code").exists()


def test_snapshot_that_cannot_be_copied_is_refused(prepared, repo):
    (repo / "weights.bin").write_bytes(bytes(3_000_000))
    with pytest.raises(
        SpecError, match=r"3\.\d+ MB in 10 files.*2 MB.*'weights.bin' \(3 MB\).*--no-code-snapshot"
    ):
        prepared(script=repo / "train.py", code_snapshot_limit=2)
    assert prepared(script=repo / "train.py", code_snapshot_limit=4).snapshot.size_bytes > 3_000_000
    assert prepared(script=repo / "train.py", code_snapshot_limit=2, code_snapshot=False).snapshot is None
    with pytest.raises(SpecError, match="must be at least 1"):
        prepared(script=repo / "train.py", code_snapshot_limit=0)


def test_failed_submission_leaves_no_copy(prepared, repo, tmp_path, monkeypatch):
    submit_and_get_copy(prepared, repo, run_dir="r")
    before = files_in(tmp_path / "r" / "code")

    submissions = [prepared(script=repo / "train.py", run_dir=run_dir) for run_dir in ("r", "other run")]

    real_popen = subprocess.Popen

    def start(command, **kwargs):
        if command[0] == "git":
            return real_popen(command, **kwargs)
        raise OSError("no more processes")

    monkeypatch.setattr("hpctrain.jobs.backends.local.subprocess.Popen", start)
    for submission in submissions:
        with pytest.raises(SchedulerError, match="no more processes"):
            submit_prepared(submission)
    assert files_in(tmp_path / "r" / "code") == before
    assert not (tmp_path / "other run").exists()


SCRIPT = """
import json, os, sys, time
import beside, installed, package
from pathlib import Path
attempt = int(os.environ["HPCTRAIN_ATTEMPT"])
values = [beside.value, installed.value, package.value, Path("data/x.txt").read_text(), os.getcwd()]
Path(os.environ["HPCTRAIN_RUN_DIR"], f"seen-{attempt}.json").write_text(json.dumps(values))
if attempt == 0:
    time.sleep(600)
"""


@pytest.mark.ranks
def test_requeued_run_uses_the_submitted_code(prepared, repo):
    sources = {
        "train.py": SCRIPT,
        "beside.py": "value = 'submitted'\n",
        "package/__init__.py": "value = 'submitted'\n",
        "src/installed.py": "value = 'submitted'\n",
    }
    (repo / "src").mkdir()
    for name, text in sources.items():
        (repo / name).write_text(text)
    search = {"PYTHONPATH": os.pathsep.join([str(repo / "src"), environment()["PYTHONPATH"]])}
    submission = prepared(
        script=repo / "train.py",
        cwd=repo,
        environ=environment(search),
        python=sys.executable,
        run_dir="runs/r",
    )
    run, _ = submit_prepared(submission)
    seen = [run.dir.path / f"seen-{attempt}.json" for attempt in (0, 1)]
    wait_for(seen[0].exists, 60, "the first attempt")
    for name in sources:
        (repo / name).write_text("raise SystemExit('edited')\n")
    run.requeue()
    run.wait(timeout=120)
    before, after = (json.loads(path.read_text()) for path in seen)
    assert before == after == ["submitted", "submitted", "submitted", "data", str(repo)]


def test_editable_packages_are_imported_from_the_copy(tmp_path):
    """Both ways of pip: a path, and a finder generated by setuptools."""
    source, copy = tmp_path / "source", tmp_path / "source" / "runs" / "copy"
    for root, value in ((source, "source"), (copy, "copy")):
        (root / "flat").mkdir(parents=True)
        (root / "src").mkdir()
        (root / "flat" / "__init__.py").write_text(f"value = {value!r}\n")
        (root / "src" / "layout.py").write_text(f"value = {value!r}\n")
    (source / "only_here").mkdir()
    finder = tmp_path / "__editable___flat_finder.py"
    finder.write_text(
        "import importlib.util, sys\n"
        f"MAPPING = {{'flat': {str(source / 'flat')!r}}}\n"
        "class Finder:\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        if name in MAPPING:\n"
        "            return importlib.util.spec_from_file_location(name, MAPPING[name] + '/__init__.py')\n"
        "sys.meta_path.append(Finder)\n"
    )
    probe = (
        "import os, sys\n"
        f"sys.path[:0] = [{str(tmp_path)!r}, {str(source / 'src')!r}, {str(source / 'only_here')!r}]\n"
        "import __editable___flat_finder\n"
        "from hpctrain.runtime.snapshot_imports import redirect_imports\n"
        "redirect_imports(os.environ)\n"
        "import flat, layout\n"
        "print(flat.value, layout.value, sys.path[2], os.environ['PYTHONPATH'].split(':')[0])\n"
    )
    variables = {
        "HPCTRAIN_CODE_DIR": str(copy),
        "HPCTRAIN_CODE_SOURCE": str(source),
        "PYTHONPATH": f"{source / 'src'}:{environment()['PYTHONPATH']}",
    }
    result = run_command([sys.executable, "-c", probe], variables)
    assert result.stdout.split() == ["copy", "copy", str(source / "only_here"), str(copy / "src")]


def test_ignored_file_is_named_when_it_is_not_found(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    (source / "sets" / "data").mkdir(parents=True)
    (source / "sets" / "data" / "a b.txt").touch()
    (copy / "sets").mkdir(parents=True)
    environ = {"HPCTRAIN_CODE_DIR": str(copy), "HPCTRAIN_CODE_SOURCE": str(source)}
    errors = [FileNotFoundError(f"Couldn't find '{copy}/sets/data'")]
    for path in ("sets/data/a b.txt", "sets/gone.txt", "../elsewhere"):
        with pytest.raises(FileNotFoundError) as error:
            (copy / path).read_text()
        errors.append(error.value)
    folder, file, *others = (describe_missing_copy(error, environ) for error in errors)
    for hint, name in ((folder, "sets/data"), (file, "sets/data/a b.txt")):
        assert hint == (
            "git ignores sets/data, so it is missing from the code snapshot that the ranks use. Submit with "
            f"--no-code-snapshot, or open {name} in the working directory or by its path {source}/{name}"
        )
    assert others == ["", ""]


def test_missing_git_is_noted(prepared, repo, tmp_path):
    submission = prepared(script=repo / "train.py", environ=environment({"PATH": str(tmp_path)}))
    assert "the code is not copied (git not found on PATH)" in submission.notes[-1]


SECRET = "outside-secret-42"


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("template")
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "train.py").write_text("print('here')\n")
    (folder / "data").mkdir()
    (folder / "data" / "x.txt").write_text("inside\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=first")
    return folder


@pytest.fixture
def small_repo(tmp_path, template) -> Path:
    return shutil.copytree(template, tmp_path / "repo")


@pytest.fixture
def outside(tmp_path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "x.txt").write_text(SECRET)
    return folder


def copy_code(small_repo: Path, limit_mb: int = 20) -> Path:
    """Return the snapshot that a submission would make."""
    snapshot, notes = plan_snapshot(str(small_repo / "train.py"), limit_mb, environment())
    assert snapshot is not None, notes
    run = RunDir(small_repo.parent / "run")
    run.path.mkdir(exist_ok=True)
    copy = Path(snapshot.reference(run).copy)
    with snapshot.copied_to(copy):
        return copy


def test_symlinks_stay_symlinks(small_repo, outside):
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
        (small_repo / name).symlink_to(target)
    git(small_repo, "add", "--all")
    copy = copy_code(small_repo)
    assert all((copy / name).is_symlink() for name in targets)
    for path in copy.rglob("*"):
        assert path.is_symlink() or path.is_dir() or SECRET not in path.read_text(errors="replace"), path
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
def test_special_file_is_refused_or_ignored(small_repo, make, name):
    (small_repo / name).unlink(missing_ok=True)
    make(small_repo / name)
    if name == "new.py":
        assert not (copy_code(small_repo) / name).exists()
    else:
        with pytest.raises(
            SpecError,
            match=r"data/x\.txt': it is neither a regular file nor a symbolic link.*--no-code-snapshot",
        ):
            copy_code(small_repo)


def test_repository_with_an_outside_worktree_copies_nothing_from_it(small_repo, outside):
    """A `.git` file names a repository with another working tree."""
    git(outside, "init", "--quiet")
    git(outside, "add", ".")
    git(outside, "config", "core.worktree", str(outside))
    victim = small_repo.parent / "victim"
    victim.mkdir()
    (victim / "train.py").write_text("print('victim')\n")
    (victim / ".git").write_text(f"gitdir: {outside / '.git'}\n")
    snapshot, notes = plan_snapshot(str(victim / "train.py"), 20, environment())
    assert snapshot is None
    assert str(outside) in notes[0]


@pytest.mark.parametrize("location", [".", "inner"])
def test_programs_of_the_repository_are_not_run(small_repo, location, tmp_path):
    """Hooks, file system monitors, external diffs and converters."""
    executed = tmp_path / "executed"
    inner = small_repo / location
    if location != ".":
        shutil.copytree(small_repo, tmp_path / location).rename(inner)
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
    copy_code(small_repo)
    assert not executed.exists()
