"""Copy the code at submission, so that a requeued run executes the code that was submitted."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import SpecError
from hpctrain.files import make_folder, read_json, write_atomic
from hpctrain.jobs.backends.base import SubmissionUnconfirmed
from hpctrain.jobs.options.resolved_options import SENT_CODE_FILE
from hpctrain.jobs.submit.git_repository import GitRepository, NotARepository, OutsideRepository
from hpctrain.jobspec.job_spec import CodeRef
from hpctrain.rundir import RunDir
from hpctrain.text import format_size

#: Minimum bytes counted per file: copying a hundred thousand files takes long, regardless of their size.
_LEAST = 4096


@dataclass(frozen=True)
class SentCode:
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


@dataclass(frozen=True)
class CodeSnapshot:
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
        copy = run.new_code()
        script = None if self.script is None else str(copy / self.script)
        source = str(self.repository.root)
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
        facts = {"commit": self.repository.commit, "changed": bool(diff or new_files), "new_files": new_files}
        facts |= {"num_files": len(self.files), "size_bytes": self.size_bytes}
        record = {"source": str(self.repository.root), **facts}
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
