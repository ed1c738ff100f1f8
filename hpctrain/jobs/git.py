"""What git says of the folder that a script lies in."""

from __future__ import annotations

import os
import re
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpctrain.errors import HpctrainError, SpecError

#: A working tree that takes longer to look through is no code, or lies on a disk that does not answer.
_LIMIT_S = 60.0

#: Variables by which git is told of another repository, as inside of one of its hooks.
_OTHER_REPOSITORY = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR"}

#: All files of the working tree, whichever folder of it git is called in.
_LIST_FILES = (
    "ls-files",
    "-z",
    "-t",
    "--cached",
    "--others",
    "--exclude-standard",
    "--full-name",
    "--",
    ":/",
)
_DIFF = ("diff", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=diff")


class NoRepository(HpctrainError):
    """There is no git, or it knows no repository here; the message says which, in a few words."""


#: What rev-parse says of a working tree: its root, which may have any name, and the commit if there is one.
_PLACE = re.compile(r"(.*?)(?:\n([0-9a-f]{40,}))?\n", re.DOTALL)


class Answer:
    """What git says; it runs from now on, and is waited for when the text is wanted."""

    def __init__(self, folder: Path, words: Sequence[str], environ: Mapping[str, str]) -> None:
        """Start git.

        Raises:
            NoRepository: there is none, or it cannot be run.
        """
        self._folder = folder
        try:
            self._process = subprocess.Popen(
                ["git", "-C", str(folder), *words],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="surrogateescape",
            )
        except FileNotFoundError:
            raise NoRepository("there is no git on the PATH") from None
        except OSError as error:
            raise NoRepository(f"git cannot be run: {error.strerror or error}") from None

    def text(self) -> str:
        """All of it; to be asked for once.

        Raises:
            NoRepository: git cannot tell.
            SpecError: it takes too long.
        """
        with self._process as process:
            try:
                out, err = process.communicate(timeout=_LIMIT_S)
            except BaseException as error:
                process.kill()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                raise SpecError(
                    f"git did not answer within {_LIMIT_S:g} s when it was asked for the files of "
                    f"{str(self._folder)!r}. Submit without a copy of the code: --no-snapshot."
                ) from None
        if process.returncode:
            words = err.strip().splitlines()
            if words and "not a git repository" in words[0]:
                raise NoRepository("it lies in no git repository")
            raise NoRepository(f"git says: {words[0] if words else f'exit code {process.returncode}'}")
        return out

    def __del__(self) -> None:
        if (process := getattr(self, "_process", None)) is not None and process.returncode is None:
            with process:
                process.kill()


class Repository:
    """A working tree."""

    def __init__(self, root: Path, environ: Mapping[str, str], files: Answer, commit: str | None) -> None:
        self.root, self.commit = root, commit
        """Its root folder, and the commit that is checked out; None where there is none yet."""
        self._environ, self._files = environ, files

    @classmethod
    def around(cls, folder: Path, environ: Mapping[str, str]) -> Repository:
        """The innermost one that `folder` lies in.

        Raises:
            NoRepository: it lies in none that git takes for one.
        """
        real = Path(os.path.realpath(folder))
        if not any(os.path.lexists(place / ".git") for place in (real, *real.parents)):
            # As git would find, which is not called for it.
            raise NoRepository("it lies in no git repository")
        kept = {name: value for name, value in environ.items() if name not in _OTHER_REPOSITORY}
        # Looking must not write, not even a fresher index.
        quiet = {**kept, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
        place = Answer(folder, ["rev-parse", "--show-toplevel", "--revs-only", "HEAD"], quiet)
        files = Answer(folder, _LIST_FILES, quiet)
        match = _PLACE.fullmatch(place.text())
        assert match is not None
        return cls(Path(match[1]), quiet, files, match[2])

    def files(self) -> dict[str, bool]:
        """Paths of all files that are tracked, or new and not ignored, submodules' too, and which are new.

        To be asked for once.

        Raises:
            NoRepository: git cannot list them.
        """
        found: dict[str, bool] = {}
        for tag, name in (entry.split(" ", 1) for entry in self._files.text().split("\0") if entry):
            try:
                mode = os.lstat(os.path.join(self.root, name)).st_mode
            except OSError:
                continue  # It is deleted, and that is not committed.
            if stat.S_ISDIR(mode):
                found |= self._files_within(name.rstrip("/"))
            else:
                found[name] = tag == "?"
        return found

    def _files_within(self, name: str) -> dict[str, bool]:
        """Files of a repository inside of this one: a submodule, or one that lies there by itself."""
        root = self.root / name
        if not (root / ".git").exists():
            return {}
        inner = Repository(root, self._environ, Answer(root, _LIST_FILES, self._environ), None)
        return {f"{name}/{file}": is_new for file, is_new in inner.files().items()}

    def diff(self) -> Answer | None:
        """How tracked files differ from the commit; what other programs git may be set up to call are not.

        None where there is no commit yet.

        Raises:
            NoRepository: git cannot be run.
        """
        return Answer(self.root, [*_DIFF, self.commit], self._environ) if self.commit else None
