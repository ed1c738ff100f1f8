"""Ask git for the files of the repository that contains a script."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from hpctrain.errors import HpctrainError, SpecError

#: Seconds: if listing takes longer, the working tree is not just code, or the disk does not respond.
_LIMIT_S = 60.0

#: Variables that point git to another repository, such as inside one of its hooks.
_OTHER_REPOSITORY = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"}

#: Arguments to list all files of the working tree, from any of its folders.
_LIST_FILES = ("ls-files", "-zt", "--cached", "--others", "--exclude-standard", "--full-name", "--", ":/")
#: Options that prevent git from running programs of the repository: file system monitor and hooks.
_RUN_NOTHING = ("-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=diff")


class NotARepository(HpctrainError):
    """git is missing, or the folder is not in a repository; the message is a short reason."""


class OutsideRepository(NotARepository): ...


#: Output of rev-parse: the root of the working tree, which may have any name, and the commit if any.
_PLACE = re.compile(r"(.*?)(?:\n([0-9a-f]{40,}))?\n", re.DOTALL)


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
