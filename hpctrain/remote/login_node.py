"""Check a cluster, and run hpctrain in the folder of a project there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain._version import __version__
from hpctrain.errors import UserError
from hpctrain.files import make_folder, read_json, try_lock, write_atomic
from hpctrain.remote.protocol import CLUSTER_VARIABLE, STREAM_VARIABLE
from hpctrain.remote.ssh_connection import LoginNodeUnreachable, SshConnection
from hpctrain.text import format_size

#: Environment that `setup` creates on the cluster.
VENV = "$HOME/.local/share/hpctrain/venv"
_LOCK_LIMIT_S = 10.0
#: Message of the cluster's shell if a variable of a path is not set.
_UNSET = "is not set"
#: Bytes that must be writable besides the code, for the first files of a run.
_SPARE_BYTES = 1_000_000

_FACTS_SCRIPT = """
FOLDER=%s
write() { mkdir -p -- "$FOLDER" && cd -- "$FOLDER" && head -c %d /dev/zero >.hpctrain-test; }
echo "write_error=$(write 2>&1 | tail -n 1)"
rm -f -- "$FOLDER/.hpctrain-test"
cd -- "$FOLDER" 2>/dev/null
echo "folder=$PWD"
echo "free_kb=$(df -Pk . | tail -n 1 | tr -s ' ' | cut -d' ' -f4)"
%s
echo "python=$(command -v "$PY")"
echo "python_version=$("$PY" --version 2>/dev/null | cut -d' ' -f2)"
echo "hpctrain=$("$PY" -P -c 'from hpctrain import __version__ as v; print(v)' 2>/dev/null)"
echo "sbatch=$(command -v sbatch)"
echo "rsync=$(command -v rsync)"
"""


class LoginNode:
    """The login node of a cluster that `--on` names."""

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
        self.python: str | None = record.get("pythons", {}).get(str(self.root))
        """Path of Python on the cluster for this project, if the user named one."""
        self._recorded_python = self.python
        self.folder = self._default_folder = self._choose_folder(record.get("folders", {}))
        """Folder of the project on the cluster, absolute or relative to the home folder."""

    def remember(self) -> None:
        """Record the folder, or another one if a project has taken it in the meantime, and the Python."""
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
            record = records.setdefault(self.name, {})
            folders = record.setdefault("folders", {})
            if self.folder == self._default_folder:
                self.folder = self._default_folder = self._choose_folder(folders)
            folders[str(self.root)] = self.folder
            if self.python != self._recorded_python:
                record.setdefault("pythons", {})[str(self.root)] = self.python
            write_atomic(self._path, json.dumps(records, indent=1), private=True)
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

    If the variable is not set, the script ends with an error that contains `_UNSET`.
    """
    match = re.fullmatch(r"(?:(~)|\$([A-Za-z_]\w*)|\$\{([A-Za-z_]\w*)\})(?:/(.*))?", path, re.DOTALL)
    start, suffix = "", path
    if match:
        start, suffix = match[1] or f'"${{{match[2] or match[3]}:?{_UNSET}}}"', match[4] or ""
    if "$" in suffix or (not start and suffix.startswith("~")):
        raise UserError(
            f"{path!r} is not a valid path on a cluster: only ~/ or one variable at its start is expanded. "
            "Remove any other `$` or `~`."
        )
    return "/".join(piece for piece in (start, suffix and shlex.quote(suffix)) if piece)


def collect_facts(login_node: LoginNode) -> dict[str, str]:
    """Create the folder of the project, and collect facts; an empty string means a missing item."""
    script = _FACTS_SCRIPT % (shell_path(login_node.folder), _SPARE_BYTES, login_node.choose_python())
    result = login_node.connection.run("; ".join(script.strip().splitlines()))
    facts = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    if "rsync" not in facts:
        reason = (result.stderr or result.stdout).strip() or f"exit code {result.returncode}"
        if match := re.search(rf"(\w+): {_UNSET}$", reason):
            raise UserError(
                f"A path (--folder or --python) contains the variable {match[1]}, which is not set on "
                f"{login_node.name}. Use another path."
            )
        raise LoginNodeUnreachable(f"{login_node.name} cannot run a script in a bash login shell: {reason}.")
    login_node.connection.rsync_path = facts["rsync"] or "rsync"
    return facts


def find_problems(
    login_node: LoginNode, facts: Mapping[str, str], *, size_bytes: int = 0, needs_slurm: bool = True
) -> Iterator[str]:
    """Yield a sentence for each problem that prevents the submission of `size_bytes` of code."""
    name, setup = login_node.name, f"`hpctrain --on {login_node.name} setup"
    needed = size_bytes + _SPARE_BYTES
    free = int(facts["free_kb"]) * 1024 if facts["free_kb"].isdigit() else needed
    if facts["write_error"]:
        reason = facts["write_error"].rpartition(": ")[2]
        yield (
            f"Cannot write to {login_node.folder} on {name}: {reason}. Free space there, or choose "
            f"another folder with {setup} --folder DIR`."
        )
    elif free < needed:
        yield (
            f"{facts['folder']} on {name} has {format_size(free)} left, but the code needs "
            f"{format_size(needed)}. Free space there, or choose another folder with {setup} --folder DIR`."
        )
    if not is_supported(facts):
        problem = f"{login_node.python} does not run" if login_node.python else "none is on the PATH"
        if facts["python_version"]:
            problem = f"{login_node.python or facts['python']} is Python {facts['python_version']}"
        yield (
            f"{name} needs Python 3.11 or newer, but {problem}. Load a suitable Python in "
            f"~/.bash_profile there, or select one with {setup} --python PATH`."
        )
    elif not facts["hpctrain"]:
        yield f"{facts['python']} on {name} has no hpctrain. Install it with {setup}`."
    elif facts["hpctrain"] != __version__:
        yield (
            f"{name} has hpctrain {facts['hpctrain']}, but this machine has {__version__}. Install the "
            f"same version there with {setup}`."
        )
    if needs_slurm and not facts["sbatch"]:
        yield (
            f"{name} has no sbatch on the PATH of a login shell. Load Slurm in ~/.bash_profile "
            "there, or run without Slurm with --backend local."
        )
    if not facts["rsync"]:
        yield f"{name} has no rsync, which sends the code. Install rsync there."


def is_supported(facts: Mapping[str, str]) -> bool:
    version = facts["python_version"].split(".")
    return tuple(int(number) for number in version[:2] if number.isdigit()) >= (3, 11)
