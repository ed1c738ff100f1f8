"""Find the file system of a path, and if other nodes share it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from hpctrain.jobspec.job_spec import JobSpec
from hpctrain.slurm.site_facts import RunQuery, nodes_are_this_machine

_MOUNTS = Path("/proc/self/mounts")

#: File system types that several hosts can mount. FUSE types have their name after the dot.
_SHARED = re.compile(
    r"(?:fuse\.)?(?:nfs4?|lustre|gpfs|beegfs|ceph|wekafs|panfs|cifs|smb3|afs|pvfs2|orangefs|glusterfs|sshfs|"
    r"mfs|moosefs|juicefs|dfuse|daos|quobyte|9p|virtiofs|vast|gfs2|ocfs2|s3fs|gcsfuse|blobfuse2?)"
)
#: Folders that are local to each node on any cluster.
_PER_NODE = ("/tmp", "/var/tmp", "/dev/shm", "/run")

_ESCAPE = re.compile(r"\\([0-7]{3})")


class Mount(NamedTuple):
    source: str
    point: str
    type: str

    @property
    def is_shared(self) -> bool:
        """True if several hosts can mount this type at once."""
        return _SHARED.fullmatch(self.type) is not None


def find_mount(path: str | os.PathLike[str], table: Path = _MOUNTS) -> Mount | None:
    """Return the file system of `path`; None if the kernel provides no mount table."""
    try:
        lines = table.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return None
    real = os.path.realpath(path)
    mount = None
    # If two file systems are mounted on the same point, the last hides the first.
    for line in lines:
        cells = [_ESCAPE.sub(lambda match: chr(int(match[1], 8)), cell) for cell in line.split(" ")]
        if len(cells) < 4:
            continue
        source, point, kind = cells[:3]
        is_inside = real == point or real.startswith(point.rstrip("/") + "/")
        if is_inside and (mount is None or len(point) >= len(mount.point)):
            mount = Mount(source, point, kind)
    return mount


def is_node_local(path: str | os.PathLike[str]) -> bool:
    """Return true if the path is local to each node, such as in an unshared /tmp."""
    real = os.path.realpath(path)
    if not any(real == folder or real.startswith(f"{folder}/") for folder in _PER_NODE):
        return False
    mount = find_mount(real)
    return mount is None or not mount.is_shared


def path_notes(spec: JobSpec, ask: RunQuery) -> list[str]:
    """Return a warning if a path of the job is in a node-local folder such as /tmp."""
    paths = {
        **({"script": spec.script} if spec.program == "script" else {}),
        "interpreter": spec.python,
        "working directory": spec.workdir,
        "run folder": spec.run_dir,
    }
    # Check the parent folder: the interpreter of a virtual environment is a symbolic link. The path is
    # relative for a conda environment given by name, which only the nodes can resolve.
    local = [
        f"{name} {path!r}"
        for name, path in paths.items()
        if os.path.isabs(path) and is_node_local(Path(path).parent)
    ]
    if not local or nodes_are_this_machine(ask):
        return []
    listed = " and the ".join(filter(None, [", the ".join(local[:-1]), local[-1]]))
    verb, pronoun = ("is", "it") if len(local) == 1 else ("are", "them")
    move = f"Move {pronoun} to a folder that all nodes share, such as your home folder."
    return [
        f"The {listed} {verb} in a node-local folder, so ranks on other nodes may not find {pronoun}. {move}"
    ]
