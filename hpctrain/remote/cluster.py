"""Remember the folder and Python of a project on a cluster, and run hpctrain there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.errors import UserError
from hpctrain.files import make_folder, read_json, try_lock, write_atomic
from hpctrain.remote.protocol import CLUSTER_VARIABLE, STREAM_VARIABLE
from hpctrain.remote.ssh_connection import SshConnection

#: Environment that `setup` creates on the cluster.
VENV = "$HOME/.local/share/hpctrain/venv"
_LOCK_LIMIT_S = 10.0
#: Message of the cluster's shell if a variable of a path is not set.
UNSET = "is not set"


class Cluster:
    """A cluster that `--on` names."""

    def __init__(self, name: str, cwd: Path, environ: Mapping[str, str]) -> None:
        """Read what earlier commands recorded about the cluster; nothing is opened yet."""
        self.connection = SshConnection(name, environ)
        self.name, self.environ = name, environ
        folders = (cwd, *cwd.parents)
        self.root = next((folder for folder in folders if os.path.lexists(folder / ".git")), cwd)
        """Root of the project on this machine: the git repository, or the current folder."""
        self._subfolder = cwd.relative_to(self.root)
        state = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME", "~"), ".local", "state")
        self._path = Path(state, "hpctrain", "clusters.json").expanduser()
        record = self._records().get(name, {})
        folders = record.get("folders", {})
        pythons = record.get("pythons", {})
        self.python: str | None = pythons.get(str(self.root), record.get("python"))
        """Path of Python on the cluster for this project, if the user named one."""
        self._recorded_python = self.python
        self.folder = self._own_folder = self._choose_folder(folders)
        """Folder of the project on the cluster, absolute or relative to the home folder."""

    def remember(self) -> None:
        """Record the folder and Python for later commands.

        If another project has taken the default folder in the meantime, choose another folder.
        """
        make_folder(self._path.parent, private=True)
        path, deadline = self._path.with_suffix(".lock"), time.monotonic() + _LOCK_LIMIT_S
        while (lock := try_lock(path)) is None:
            if time.monotonic() > deadline:
                raise UserError(
                    f"Another process holds the lock {str(path)!r}. Wait until that process ends, then try "
                    "again."
                )
        try:
            records = self._records()
            folders = records.get(self.name, {}).get("folders", {})
            if self.folder == self._own_folder:
                self.folder = self._own_folder = self._choose_folder(folders)
            record = records.get(self.name, {}) | {"folders": {**folders, str(self.root): self.folder}}
            if self.python != self._recorded_python:
                record["pythons"] = record.get("pythons", {}) | {str(self.root): self.python}
            write_atomic(self._path, json.dumps(records | {self.name: record}, indent=1), private=True)
        finally:
            os.close(lock)

    def hpctrain(self, args: Sequence[str], *, stream: bool = False) -> str:
        """Return a script that runs `hpctrain ARGS` in the folder that corresponds to the current one."""
        variables = {CLUSTER_VARIABLE: self.name, **({STREAM_VARIABLE: "1"} if stream else {})}
        exported = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        folder = os.path.normpath(os.path.join(self.folder, self._subfolder))
        setup = f"`hpctrain --on {self.name} setup"
        no_folder = (
            f"There is no folder {folder} on {self.name}. Submit from this project first, or select another "
            f"folder with {setup} --folder DIR`."
        )
        does_not_start = shlex.quote(f"Error: hpctrain does not start on {self.name}: ")
        remedy = shlex.quote(f". Run {setup}` to find the cause or to install hpctrain.")
        return (
            f"cd {shell_path(folder)} 2>/dev/null || "
            f"{{ echo {shlex.quote(f'Error: {no_folder}')} >&2; exit 3; }}; {self.choose_python()}; "
            'E=$("$PY" -P -c "import hpctrain" 2>&1 >/dev/null) || '
            f"{{ echo {does_not_start}\"${{E##*$'\\n'}}\"{remedy} >&2; exit 3; }}; "
            # 255 is ssh's own exit code, of a lost connection.
            f'export {exported}; trap : INT QUIT; "$PY" -P -m hpctrain {shlex.join(args)}; '
            "E=$?; [ $E != 255 ] || E=254; exit $E"
        )

    def choose_python(self) -> str:
        if self.python:
            return f"PY={shell_path(self.python)}"
        return f'PY="{VENV}/bin/python"; [ -x "$PY" ] || PY=python3'

    def _choose_folder(self, folders: Mapping[str, str]) -> str:
        if recorded := folders.get(str(self.root)):
            return recorded
        name = self.root.name or "root"
        if any(Path(root).name == name for root in folders):
            name += f"-{hashlib.sha256(os.fsencode(self.root)).hexdigest()[:6]}"
        return f"hpctrain/{name}"

    def _records(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return read_json(self._path)
        return {}


def shell_path(path: str) -> str:
    """Quote a path of the cluster for its shell; `~` or a variable at the start is expanded there.

    If the variable is not set, the script ends with an error that contains `UNSET`.
    """
    match = re.fullmatch(r"(?:(~)|\$([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*)\})(?:/(.*))?", path, re.DOTALL)
    start, suffix = "", path
    if match:
        start, suffix = match[1] or f'"${{{match[2] or match[3]}:?{UNSET}}}"', match[4] or ""
    if "$" in suffix or (not start and suffix.startswith("~")):
        raise UserError(
            f"{path!r} is not a valid path on a cluster: only ~/ or one variable at its start is expanded. "
            "Remove any other `$` or `~`."
        )
    return "/".join(piece for piece in (start, suffix and shlex.quote(suffix)) if piece)
