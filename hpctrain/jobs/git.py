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


class NoRepository(HpctrainError):
    """There is no git, or it knows no repository here; the message says which, in a few words."""


#: What rev-parse says of a working tree: its root, which may have any name, and the commit if there is one.
_PLACE = re.compile(r"(.*?)(?:\n([0-9a-f]{40,}))?\n", re.DOTALL)


class Repository:
    """A working tree."""

    def __init__(self, root: Path, environ: Mapping[str, str], commit: str | None = None) -> None:
        self.root, self._environ = root, environ
        self.commit = commit
        """The commit that is checked out; None where there is none yet."""

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
        outside = cls(folder, {**kept, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"})
        match = _PLACE.fullmatch(outside._say("rev-parse", "--show-toplevel", "--revs-only", "HEAD"))
        assert match is not None
        return cls(Path(match[1]), outside._environ, match[2])

    def files(self) -> dict[str, bool]:
        """Paths of all files that are tracked, or new and not ignored, submodules' too, and which are new.

        Raises:
            NoRepository: git cannot list them.
        """
        listed = self._say("ls-files", "-z", "-t", "--cached", "--others", "--exclude-standard").split("\0")
        found: dict[str, bool] = {}
        for tag, name in (entry.split(" ", 1) for entry in listed if entry):
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
        inner = Repository(self.root / name, self._environ)
        if not (inner.root / ".git").exists():
            return {}
        return {f"{name}/{file}": is_new for file, is_new in inner.files().items()}

    def diff(self) -> str:
        """How tracked files differ from the commit; what other programs git may be set up to call are not.

        Empty where there is no commit yet.

        Raises:
            NoRepository: git cannot tell.
        """
        if self.commit is None:
            return ""
        return self._say(
            "diff", "--no-color", "--no-ext-diff", "--no-textconv", "--submodule=diff", self.commit
        )

    def _say(self, *words: str) -> str:
        return _run(["git", "-C", str(self.root), *words], self._environ)


def _run(command: Sequence[str], environ: Mapping[str, str]) -> str:
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=_LIMIT_S,
            check=False,
        )
    except FileNotFoundError:
        raise NoRepository("there is no git on the PATH") from None
    except OSError as error:
        raise NoRepository(f"git cannot be run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise SpecError(
            f"git did not answer within {_LIMIT_S:g} s when it was asked for the files of {command[2]!r}. "
            "Submit without a copy of the code: --no-snapshot."
        ) from None
    if done.returncode:
        words = done.stderr.strip().splitlines()
        if words and "not a git repository" in words[0]:
            raise NoRepository("it lies in no git repository")
        raise NoRepository(f"git says: {words[0] if words else f'exit code {done.returncode}'}")
    return done.stdout
