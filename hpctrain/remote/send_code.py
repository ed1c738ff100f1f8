"""Send the files of a project to a cluster, with a record of its Git state for the code snapshot."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hpctrain.errors import UserError
from hpctrain.jobs.options.resolved_options import SENT_CODE_FILE
from hpctrain.jobs.submit.code_snapshot import GitRepository, NotARepository
from hpctrain.remote.login_node import LoginNode, shell_path
from hpctrain.text import format_size

#: Limit outside a git repository, where data and code cannot be told apart.
_MAX_BYTES = 100_000_000
_SKIPPED = ("runs", "__pycache__", "node_modules")


@dataclass(frozen=True)
class LocalCode:
    """Files of the project, with commit and changes."""

    files: Mapping[str, bool]
    """Paths below the root; True for files that git does not track."""
    size_bytes: int
    commit: str | None = None
    diff: str = ""

    @classmethod
    def find(cls, root: Path, environ: Mapping[str, str]) -> LocalCode:
        try:
            repository = GitRepository.containing(root, environ)
            files, diff = repository.files(), repository.diff()
            return cls(files, _size(root, files), repository.commit, diff.text() if diff else "")
        except NotARepository as reason:
            files = dict.fromkeys(_walk(root), True)
            if (size := _size(root, files)) > _MAX_BYTES:
                raise UserError(
                    f"{str(root)!r} contains {format_size(size)}, but at most {format_size(_MAX_BYTES)} can "
                    f"be sent if git cannot list the files ({reason}). Run `git init`, and add data files to "
                    ".gitignore."
                ) from None
            return cls(files, size)


def send_code(login_node: LoginNode, code: LocalCode) -> None:
    """Copy changed files to the cluster, with a list that the code snapshot of a run reads there.

    Files that were sent earlier and no longer exist are deleted there.
    """
    target, list_path = f"{login_node.name}:{login_node.folder}/", f"{login_node.folder}/{SENT_CODE_FILE}"
    sent: list[str] = []
    # Nothing was sent, or the list is damaged.
    with suppress(ValueError, TypeError, KeyError):
        sent = list(
            map(str, json.loads(login_node.connection.run(f"cat {shell_path(list_path)}").stdout)["files"])
        )
    deleted = [
        name
        for name in sent
        if name not in code.files
        and not (name.startswith("/") or ".." in name.split("/") or os.path.lexists(login_node.root / name))
    ]
    login_node.connection.rsync(
        ["-lptz", "--files-from=-", "--from0", f"{login_node.root}/", target], "\0".join(code.files)
    )
    if deleted:
        script = f"cd {shell_path(login_node.folder)} && xargs -0 rm -f --"
        login_node.connection.run(script, "\0".join(deleted))
    with tempfile.TemporaryDirectory(prefix="hpctrain-") as folder:
        listed = Path(folder, SENT_CODE_FILE)
        listed.write_text(json.dumps({"commit": code.commit, "files": code.files, "diff": code.diff}))
        login_node.connection.rsync(["-pz", str(listed), target])


def _walk(root: Path) -> Iterator[str]:
    """Yield the files below a folder, without hidden ones, runs and virtual environments."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if not name.startswith(".")
            and name not in _SKIPPED
            and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
        ]
        links = [name for name in subfolders if os.path.islink(os.path.join(folder, name))]
        for name in [*names, *links]:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(folder, name), root)


def _size(root: Path, files: Mapping[str, bool]) -> int:
    return sum(os.lstat(root / name).st_size for name in files)
