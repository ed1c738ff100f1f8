"""Copy the code at submission, so that a requeued run executes the code that was submitted."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

from msgspec import Struct

from hpctrain.errors import HpctrainError, SpecError
from hpctrain.files import make_folder, read_json, write_atomic
from hpctrain.jobs.backends.backend import SubmissionUnconfirmed
from hpctrain.jobs.options.resolved_options import SENT_CODE_FILE
from hpctrain.jobspec.job_spec import CodeRef
from hpctrain.rundir import RunDir
from hpctrain.text import format_size

#: Minimum bytes counted per file: copying a hundred thousand files takes long, regardless of their size.
_LEAST = 4096
#: Seconds: if listing takes longer, the working tree is not just code, or the disk does not respond.
_LIMIT_S = 60.0

#: Variables that point git to another repository, such as inside one of its hooks.
_OTHER_REPOSITORY = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"}

#: Arguments to list all files of the working tree, from any of its folders.
_LIST_FILES = ("ls-files", "-zt", "--cached", "--others", "--exclude-standard", "--full-name", "--", ":/")
#: Options that prevent git from running programs of the repository: file system monitor and hooks.
_RUN_NOTHING = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=diff")
#: Output of rev-parse: the root of the working tree, which may have any name, and the commit if any.
_PLACE = re.compile(r"(.*?)(?:\n([0-9a-f]{40,}))?\n", re.DOTALL)


class NotARepository(HpctrainError):
    """git is missing, or the folder is not in a repository; the message is a short reason."""


class OutsideRepository(NotARepository): ...


class GitCommand:
    """Output of git, which runs in the background until the output is read."""

    def __init__(self, folder: Path, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self._folder = folder
        try:
            self._process = subprocess.Popen(
                ["git", *_RUN_NOTHING, "-C", str(folder), *command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="surrogateescape",
            )
        except FileNotFoundError:
            raise NotARepository("git not found on PATH") from None
        except OSError as error:
            raise NotARepository(f"cannot run git: {error.strerror or error}") from None

    def text(self) -> str:
        """Return the complete output; call this only once."""
        with self._process as process:
            try:
                out, err = process.communicate(timeout=_LIMIT_S)
            except BaseException as error:
                process.kill()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise SpecError(
                    f"git did not finish within {_LIMIT_S:g} s in {str(self._folder)!r}. "
                    "Try again, or submit without a copy of the code (--no-code-snapshot)."
                ) from None
        if process.returncode:
            messages = err.strip().splitlines()
            if messages and "not a git repository" in messages[0]:
                raise OutsideRepository("not in a git repository")
            raise NotARepository(
                f"git failed: {messages[0] if messages else f'exit code {process.returncode}'}"
            )
        return out

    def __del__(self) -> None:
        if (process := getattr(self, "_process", None)) is not None and process.returncode is None:
            with process:
                process.kill()


class GitRepository:
    def __init__(self, root: Path, environ: Mapping[str, str], files: GitCommand, commit: str | None) -> None:
        #: The checked-out commit; None if there is no commit yet.
        self.root, self.commit = root, commit
        self._environ, self._files = environ, files

    @classmethod
    def containing(cls, folder: Path, environ: Mapping[str, str]) -> GitRepository:
        """Return the innermost repository that contains `folder`."""
        real = Path(os.path.realpath(folder))
        if not any(os.path.lexists(place / ".git") for place in (real, *real.parents)):
            # Git would give the same result, but starting git takes time.
            raise OutsideRepository("not in a git repository")
        variables = {name: value for name, value in environ.items() if name not in _OTHER_REPOSITORY}
        # Reading must not write anything, including a refreshed index.
        quiet = {**variables, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        place = GitCommand(folder, ["rev-parse", "--show-toplevel", "--revs-only", "HEAD"], quiet)
        files = GitCommand(folder, _LIST_FILES, quiet)
        match = _PLACE.fullmatch(place.text())
        assert match is not None
        if not real.is_relative_to(match[1]):
            raise NotARepository(f"the git working tree is in another folder, {match[1]!r}")
        return cls(Path(match[1]), quiet, files, match[2])

    def files(self) -> dict[str, bool]:
        """Return all tracked or new files, including those of submodules; True for new files."""
        files: dict[str, bool] = {}
        links: dict[str, bool] = {}
        for tag, name in (entry.split(" ", 1) for entry in self._files.text().split("\0") if entry):
            folder = os.path.dirname(name)
            if folder not in links:
                links[folder] = self._has_link(folder)
            if links[folder]:
                continue  # The folder is now a link: the files that git lists in it have been deleted.
            try:
                mode = os.lstat(os.path.join(self.root, name)).st_mode
            except OSError:
                continue  # The file was deleted, but the deletion is not committed.
            if stat.S_ISDIR(mode):
                files |= self._files_within(name.rstrip("/"))
            else:
                files[name] = tag == "?"
        return files

    def _has_link(self, folder: str) -> bool:
        ancestors = accumulate(folder.split("/"), os.path.join)
        return any(os.path.islink(os.path.join(self.root, ancestor)) for ancestor in ancestors)

    def _files_within(self, name: str) -> dict[str, bool]:
        """Return files of a nested repository: a submodule or an independent repository."""
        root = self.root / name
        if not (root / ".git").exists():
            return {}
        inner = GitRepository(root, self._environ, GitCommand(root, _LIST_FILES, self._environ), None)
        return {f"{name}/{file}": is_new for file, is_new in inner.files().items()}

    def diff(self) -> GitCommand | None:
        """Return the diff of tracked files against the commit, without running external diff programs."""
        return GitCommand(self.root, [*_DIFF, self.commit], self._environ) if self.commit else None


class SentCode(Struct, frozen=True):
    """Files sent by another machine; replaces the `GitRepository`, which exists only on that machine."""

    root: Path
    commit: str | None
    _files: Mapping[str, bool]
    _diff: str

    @classmethod
    def containing(cls, folder: Path) -> SentCode | None:
        """Return the sent code that contains a folder; None if git manages the folder, or it was not sent."""
        real = Path(os.path.realpath(folder))
        root = next((folder for folder in (real, *real.parents) if (folder / SENT_CODE_FILE).is_file()), None)
        between = (folder for folder in (real, *real.parents) if root and folder.is_relative_to(root))
        if root is None or any(os.path.lexists(folder / ".git") for folder in between):
            return None
        try:
            record = read_json(root / SENT_CODE_FILE)
            files = {str(name): bool(is_new) for name, is_new in record["files"].items()}
            commit, diff = record["commit"], str(record["diff"])
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise SpecError(f"{str(root / SENT_CODE_FILE)!r} is damaged: {error}. Submit again.") from error
        if outside := [name for name in files if name.startswith("/") or ".." in name.split("/")]:
            raise SpecError(
                f"{str(root / SENT_CODE_FILE)!r} contains {outside[0]!r}, which is outside the project. "
                "Submit again."
            )
        return cls(root, None if commit is None else str(commit), files, diff)

    def files(self) -> dict[str, bool]:
        return {name: is_new for name, is_new in self._files.items() if os.path.lexists(self.root / name)}

    def diff(self) -> SentCode:
        return self

    def text(self) -> str:
        return self._diff


class CodeSnapshot(Struct, frozen=True):
    """Files of a working tree to copy."""

    repository: GitRepository | SentCode
    script: Path | None
    """The script's path in the working tree; None if it is elsewhere."""
    files: Mapping[str, bool]
    """Paths of the files; True for new files, which git does not track."""
    size_bytes: int
    limit_mb: int

    @classmethod
    def plan(
        cls,
        script: str | os.PathLike[str],
        limit_mb: int,
        environ: Mapping[str, str],
        *,
        folder: Path | None = None,
    ) -> CodeSnapshot:
        """Plan the copy of the working tree with the script, or with `folder`."""
        path = Path(os.path.realpath(script))
        inside = folder or path.parent
        repository = SentCode.containing(inside) or GitRepository.containing(inside, environ)
        script_path = None if folder else path.relative_to(repository.root)
        files = repository.files()
        if script_path is not None:
            # Copy the script even if git ignores it.
            files.setdefault(str(script_path), True)
        root = str(repository.root)
        sizes: dict[str, int] = {}
        for name in files:
            entry = os.lstat(os.path.join(root, name))
            if not stat.S_ISREG(entry.st_mode) and not stat.S_ISLNK(entry.st_mode):
                raise SpecError(
                    f"Cannot copy {os.path.join(root, name)!r}: it is neither a regular file nor a symbolic "
                    "link. Remove this file, or submit without a copy of the code (--no-code-snapshot)."
                )
            sizes[name] = entry.st_size
        if (total := sum(max(size, _LEAST) for size in sizes.values())) > limit_mb * 1e6:
            largest = max(sizes, key=lambda name: sizes[name])
            raise SpecError(
                f"The git repository {root!r} contains {format_size(total)} in {len(files)} files, but at "
                f"most {limit_mb} MB are copied (code_snapshot_limit). The largest file is {largest!r} "
                f"({format_size(sizes[largest])}). Add files that are not code to .gitignore, raise "
                "code_snapshot_limit, or submit without a copy of the code (--no-code-snapshot)."
            )
        return cls(repository, script_path, files, sum(sizes.values()), limit_mb)

    def reference(self, run: RunDir) -> CodeRef:
        try:
            copy = run.new_code()
        except OSError as error:
            raise SpecError(
                f"Cannot access the run folder {str(run.path)!r} (--run-dir): {error.strerror}. Choose "
                "another folder."
            ) from error
        script = None if self.script is None else str(copy / self.script)
        source = str(self.repository.root)
        return CodeRef(source=source, copy=str(copy), script=script, limit_mb=self.limit_mb)

    @contextmanager
    def copied_to(self, copy: Path) -> Iterator[None]:
        """Copy the files into the run folder; remove the copy if the block fails to submit the job."""
        if copy.exists():
            raise SpecError(
                f"The run in {str(copy.parents[1])!r} (--run-dir) was submitted again in the meantime. "
                "Submit again to continue it."
            )
        temporary = copy.with_name(f".{copy.name}.tmp")
        try:
            # The files of the working tree may be private.
            make_folder(copy.parent, private=True)
            diff = self.repository.diff()
            self._copy_to(temporary)
            self._record(copy, diff.text() if diff else "")
            os.rename(temporary, copy)
            yield
        except BaseException as error:
            shutil.rmtree(temporary, ignore_errors=True)
            # Others than Exception, such as Ctrl-C, may occur while the scheduler accepts the job.
            if isinstance(error, Exception) and not isinstance(error, SubmissionUnconfirmed):
                _remove(copy)
            raise

    def _copy_to(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        # Strings, because creating a `Path` for each of thousands of files takes as long as the copy.
        root, created = str(self.repository.root), set()
        for name in self.files:
            source, target = os.path.join(root, name), os.path.join(folder, name)
            if (parent := os.path.dirname(target)) not in created:
                os.makedirs(parent, exist_ok=True)
                created.add(parent)
            try:
                if os.path.islink(source):
                    os.symlink(self._target_of(name), target)
                else:
                    shutil.copy(source, target)
            except OSError as error:
                if str(error.filename) != source:
                    raise
                raise SpecError(
                    f"Cannot copy {source!r} into the run folder: {error.strerror}. Make the file "
                    "readable, add it to .gitignore, or submit without a copy of the code "
                    "(--no-code-snapshot)."
                ) from error

    def _target_of(self, link: str) -> str:
        """Return the copy of the target of a link if there is one, otherwise the original."""
        root = str(self.repository.root)
        parent = os.path.dirname(os.path.join(root, link))
        path = os.path.normpath(os.path.join(parent, os.readlink(os.path.join(root, link))))
        name = os.path.relpath(path, root)
        if name == "." or any(file == name or file.startswith(f"{name}/") for file in self.files):
            return os.path.relpath(path, parent)
        return path

    def _record(self, copy: Path, diff: str) -> None:
        new_files = [name for name, is_new in self.files.items() if is_new]
        record = {
            "source": str(self.repository.root),
            "commit": self.repository.commit,
            "changed": bool(diff or new_files),
            "new_files": new_files,
            "num_files": len(self.files),
            "size_bytes": self.size_bytes,
        }
        write_atomic(copy.with_name(f"{copy.name}.json"), json.dumps(record, indent=1) + "\n", durable=False)
        copy.with_name(f"{copy.name}.diff").write_bytes(diff.encode("utf-8", "surrogateescape"))


def plan_snapshot(
    script: str | os.PathLike[str],
    limit_mb: int,
    environ: Mapping[str, str],
    *,
    folder: Path | None = None,
    starts_now: bool = False,
) -> tuple[CodeSnapshot | None, list[str]]:
    """Plan the copy; if there is nothing to copy, return notes for the user."""
    if limit_mb < 1:
        raise SpecError(
            f"code_snapshot_limit is {limit_mb}, but must be at least 1. To disable the copy, use "
            "--no-code-snapshot."
        )
    if folder is None and not os.path.isfile(script):
        return None, []  # reported by the checks of the program
    try:
        return CodeSnapshot.plan(script, limit_mb, environ, folder=folder), []
    except NotARepository as reason:
        if starts_now and isinstance(reason, OutsideRepository):
            return None, []  # The user is not likely to change the script first.
        note = (
            f"Warning: the code is not copied ({reason}). If you change it, later attempts run the new code."
        )
        return None, [note]


def _remove(copy: Path) -> None:
    shutil.rmtree(copy, ignore_errors=True)
    for suffix in (".json", ".diff"):
        copy.with_name(copy.name + suffix).unlink(missing_ok=True)
    if copy.parent.is_dir() and not any(copy.parent.iterdir()):
        copy.parent.rmdir()
