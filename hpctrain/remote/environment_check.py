"""Check a cluster before a submission, and describe each problem in one sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain._version import __version__
from hpctrain.errors import UserError
from hpctrain.remote.cluster import UNSET, Cluster, shell_path
from hpctrain.remote.ssh_connection import ClusterUnreachable
from hpctrain.text import format_size

#: Bytes that must be writable besides the code, for the first files of a run.
_SPARE_BYTES = 1_000_000

_SCRIPT = """
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


@dataclass(frozen=True)
class ClusterFacts:
    """Findings of the check; an empty string means that the item is missing."""

    folder: str = ""
    write_error: str = ""
    free_kb: str = ""
    python: str = ""
    python_version: str = ""
    hpctrain: str = ""
    sbatch: str = ""
    rsync: str = ""


def collect_facts(cluster: Cluster) -> ClusterFacts:
    """Collect facts on the cluster, creating the folder of the project if it is missing."""
    script = _SCRIPT % (shell_path(cluster.folder), _SPARE_BYTES, cluster.choose_python())
    result = cluster.connection.run("; ".join(script.strip().splitlines()))
    lines = dict(line.split("=", 1) for line in result.stdout.splitlines() if "=" in line)
    if "rsync" not in lines:
        reason = (result.stderr or result.stdout).strip() or f"exit code {result.returncode}"
        if match := re.search(rf"(\w+): {UNSET}$", reason):
            raise UserError(
                f"A path (--folder or --python) contains the variable {match[1]}, which is not set on "
                f"{cluster.name}. Use another path."
            )
        raise ClusterUnreachable(f"{cluster.name} cannot run a script in a bash login shell: {reason}.")
    cluster.connection.rsync_path = lines["rsync"] or "rsync"
    return ClusterFacts(**{name: lines[name] for name in ClusterFacts.__dataclass_fields__ if name in lines})


def find_problems(
    cluster: Cluster, facts: ClusterFacts, *, size_bytes: int = 0, needs_slurm: bool = True
) -> Iterator[str]:
    """Yield a sentence for each problem that prevents the submission of `size_bytes` of code."""
    setup = f"`hpctrain --on {cluster.name} setup"
    needed = size_bytes + _SPARE_BYTES
    free = int(facts.free_kb) * 1024 if facts.free_kb.isdigit() else needed
    if facts.write_error:
        reason = facts.write_error.rpartition(": ")[2]
        yield (
            f"Cannot write to {cluster.folder} on {cluster.name}: {reason}. Free space there, or choose "
            f"another folder with {setup} --folder DIR`."
        )
    elif free < needed:
        yield (
            f"{facts.folder} on {cluster.name} has {format_size(free)} left, but the code needs "
            f"{format_size(needed)}. Free space there, or choose another folder with {setup} --folder DIR`."
        )
    if not is_supported(facts):
        problem = f"{cluster.python} does not run" if cluster.python else "none is on the PATH"
        if facts.python_version:
            problem = f"{cluster.python or facts.python} is Python {facts.python_version}"
        yield (
            f"{cluster.name} needs Python 3.11 or newer, but {problem}. Load a suitable Python in "
            f"~/.bash_profile there, or select one with {setup} --python PATH`."
        )
    elif not facts.hpctrain:
        yield f"{facts.python} on {cluster.name} has no hpctrain. Install it with {setup}`."
    elif facts.hpctrain != __version__:
        yield (
            f"{cluster.name} has hpctrain {facts.hpctrain}, but this machine has {__version__}. Install the "
            f"same version there with {setup}`."
        )
    if needs_slurm and not facts.sbatch:
        yield (
            f"{cluster.name} has no sbatch on the PATH of a login shell. Load Slurm in ~/.bash_profile "
            "there, or run without Slurm with --backend local."
        )
    if not facts.rsync:
        yield f"{cluster.name} has no rsync, which sends the code. Install rsync there."


def is_supported(facts: ClusterFacts) -> bool:
    return tuple(int(number) for number in facts.python_version.split(".")[:2] if number.isdigit()) >= (3, 11)
